"""What kind of work an instruction of a compiled step is, by this project's own names.

The traced step carries the file that asked for each instruction (scopes.py), and the compiler keeps
it through fusion; where it has none the kind is what the instruction itself shows.
"""

from __future__ import annotations

import re

from train.compile.hlo import FREE, Instruction, Program

ATTENTION = "attention"
EXPERTS = "routed experts"
DENSE = "dense matmuls"
FORMATTING = "copies and formatting"
PREFETCH = "prefetch into VMEM"
OTHER = "other"

BY_FILE = {
    "pallas_ops.attention": ATTENTION,
    "pallas_ops.norm_rope": ATTENTION,
    "torch_gemma4.attention": ATTENTION,
    "torch_gemma4.rope": ATTENTION,
    "pallas_ops.gmm": EXPERTS,
    "pallas_ops.expert_mlp": EXPERTS,
    "pallas_ops.tgmm": EXPERTS,
    "pallas_ops.split_gmm": EXPERTS,
    "pallas_ops.gather_fence": EXPERTS,
    "pallas_ops.activation": EXPERTS,
    "torch_gemma4.moe": EXPERTS,
    "torch_gemma4.linear": DENSE,
    "torch_gemma4.mlp": DENSE,
    "pallas_ops.combine": "combine and permute",
    "pallas_ops.permute": "combine and permute",
    "pallas_ops.routing": "routing",
    "torch_gemma4.router": "routing",
    "torch_gemma4.norm": "norms",
    "torch_gemma4.scales": "norms",
    "torch_gemma4.loss": "loss",
    "torch_gemma4.embedding": "embedding",
    "train.optim": "optimizer",
}
"""Kind by the beginning of a file's dotted name."""

_PRODUCTS = {"convolution", "dot"}
_UNTRUSTED = ("sort", "gather", "scatter")
_MOVES = {"copy", "transpose", "pad", "slice", "concatenate", "reshape", "bitcast", "broadcast"}
_MOVES |= {"dynamic-slice", "dynamic-update-slice", "copy-start", "slice-start"}
_NO_WORK = {"parameter", "constant", "tuple", "get-tuple-element"}
_MARKERS = {"AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast"}
_MARKERS |= {"X64SplitHigh", "X64SplitLow"}
_SCOPE = re.compile(r"\b((?:torch_gemma4|pallas_ops|train)(?:\.[a-z_]\w*)+)\.\d+(?=/|$)")

_RERUN = re.compile(r"(?:^|/)rerun\.\d+/")


def is_work(instruction: Instruction) -> bool:
    """Whether an instruction takes time of its own."""
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith(("-done", "-update")) or opcode == "recv":
        return False
    return instruction.custom_call_target not in _MARKERS


def kind_of(program: Program, instruction: Instruction) -> str:
    """The kind of an instruction that is work and no collective."""
    if instruction.opcode in ("copy-start", "slice-start"):
        return PREFETCH
    opcodes = opcodes_of(program, instruction)
    if opcodes <= _MOVES:
        return FORMATTING
    if opcodes & _PRODUCTS:
        # Whatever is fused with a product takes little beside it.
        products = [i for i in _parts(program, instruction) if i.opcode in _PRODUCTS]
        return kind_by_file(origin(products[0])) or DENSE
    asked = [instruction, *_parts(program, instruction)]
    found = (kind_by_file(origin(each)) for each in asked)
    return next((kind for kind in found if kind is not None), OTHER)


def is_rerun(program: Program, instruction: Instruction) -> bool:
    """Whether it is a second run for the backward pass (scopes.py): by its product, if it holds
    one, else by the name that the compiler gave it."""
    products = [i for i in _parts(program, instruction) if i.opcode in _PRODUCTS]
    return _RERUN.search((products or [instruction])[0].op_name) is not None


def untrusted(program: Program, instruction: Instruction) -> str | None:
    """Which of sort, gather and scatter an instruction does, for which no model is trusted."""
    opcodes = opcodes_of(program, instruction)
    return next((opcode for opcode in _UNTRUSTED if opcode in opcodes), None)


def is_product(program: Program, instruction: Instruction) -> bool:
    """Whether it runs on the matrix units."""
    return bool(opcodes_of(program, instruction) & _PRODUCTS)


def opcodes_of(program: Program, instruction: Instruction) -> set[str]:
    """Opcodes of an instruction, or of what a fusion holds, without those that do nothing."""
    return {part.opcode for part in _parts(program, instruction)} - _NO_WORK - {"fusion"}


def _parts(program: Program, instruction: Instruction) -> list[Instruction]:
    """What a fusion holds, or the instruction itself."""
    return list(program.inside(instruction)) if instruction.opcode == "fusion" else [instruction]


def origin(instruction: Instruction) -> str | None:
    """Dotted name of the file of ours that asked for an instruction."""
    if found := _SCOPE.findall(instruction.op_name):
        return found[-1]
    parts = instruction.source_file.removesuffix(".py").split("/")
    for package in ("torch_gemma4", "pallas_ops", "train"):
        if package in parts[:-1]:
            last = len(parts) - 1 - parts[::-1].index(package)
            return ".".join(parts[last:])
    return None


def kind_by_file(name: str | None) -> str | None:
    """Kind of work of a file, None for files that do no kind in particular."""
    if name is None:
        return None
    return next((k for file, k in BY_FILE.items() if f"{name}.".startswith(f"{file}.")), None)
