"""The largest buffers of a step, under names of this project.

The compiler names a buffer by the instruction that writes it. What people know is the parameter, or
the file of ours that asked for the instruction (train/compile/scopes.py) and the operation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from train.compile import hlo

_PACKAGES = ("torch_gemma4.", "pallas_ops.", "train.")
_VMEM = re.compile(r"\{[^}]*S\(1\)[^}]*\}")
_NO_BUFFER = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "call", "constant"}
_NO_BUFFER |= {"conditional", "optimization-barrier", "after-all"}
"""Opcodes whose result is another instruction's buffer."""


@dataclass(frozen=True)
class Buffer:
    """Buffers of one name and shape."""

    name: str
    """Parameter, input, or module and operation that write it."""
    shape: str
    """Such as bf16[2,1024,262144]; of one chip."""
    bytes: int
    """Of one of them."""
    count: int
    """How many the program has; they need not all live at once."""


def largest_buffers(
    program: hlo.Program, argument_names: Sequence[str], count: int = 5
) -> tuple[Buffer, ...]:
    """The `count` largest of a program in HBM, arguments included, without the padding of tiles.

    Args:
        program: optimised; its entry's parameter i is argument_names[i].
    """
    found: Counter[tuple[str, str]] = Counter()
    seen = set()
    for executed in program.executed():
        instruction = executed.instruction
        key = (executed.computation.name, instruction.name)
        if key in seen or not _in_hbm(instruction.shape):
            continue
        seen.add(key)
        shape = plain_shape(instruction.shape)
        if instruction.opcode == "parameter" and executed.computation.name == program.entry:
            found[argument_names[int(instruction.rest.split(")")[0])], shape] += 1
        elif instruction.opcode not in _NO_BUFFER and not instruction.opcode.endswith("-done"):
            found[our_name(_op_name(instruction.rest), instruction.opcode), shape] += 1
    buffers = [
        Buffer(name, shape, hlo.shape_bytes(shape), times) for (name, shape), times in found.items()
    ]
    return tuple(sorted(buffers, key=lambda buffer: (-buffer.bytes, buffer.name))[:count])


def group_buffers(
    buffers: Iterable[tuple[str, str, int]], count: int = 5
) -> tuple[Buffer, ...]:
    """The `count` largest of (name, shape, bytes), those alike as one."""
    found = Counter(buffers)
    grouped = [Buffer(*buffer, times) for buffer, times in found.items()]
    return tuple(sorted(grouped, key=lambda buffer: (-buffer.bytes, buffer.name))[:count])


def our_name(op_name: str, otherwise: str) -> str:
    """HLO's op_name, such as call.3/torch_gemma4.loss/aten__mm/dot.7, as "loss: mm".

    A jitted function of ours names itself: jit(gmm_sharded)/shard_map/all_gather is
    "gmm: all gather". `otherwise` stands for what a name does not say.
    """
    parts = [part for part in op_name.split("/") if part and not part.startswith("call.")]
    operation = re.sub(r"\.\d+$", "", parts[-1]) if parts else otherwise
    operation = operation.removeprefix("aten__").replace("_", " ").strip()
    for part in reversed(parts):
        if part.startswith(_PACKAGES):
            return f"{part.split('.', 1)[1]}: {operation}"
        if jitted := re.fullmatch(r"jit\((\w+)\)", part):
            return f"{jitted[1].removesuffix('_sharded')}: {operation}"
    return operation


def plain_shape(shape: str) -> str:
    """A shape without its layout."""
    return re.sub(r"\{[^}]*\}", "", shape)


def _in_hbm(shape: str) -> bool:
    return not shape.startswith("(") and _VMEM.search(shape) is None


def _op_name(rest: str) -> str:
    found = re.search(r'op_name="([^"]*)"', rest)
    return found[1] if found else ""
