"""Collectives of an optimised HLO program: each counted once, with what it sends over the links.

TPU writes one collective in several ways: a plain opcode; a pair of -start and -done; a fusion that
calls %all-reduce-scatter; and a chain of fusions, the first with an AsyncCollectiveStart inside,
the last with an AsyncCollectiveDone, and compute between them that carries the transfer along.

Between slices a collective is a send to the hosts' own runtime (megascale), which gives back the
result: a chip of each slice takes part, the one at the same place in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from train.compile.hlo import Executed, Instruction, Program, shape_bytes

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_CHAIN = re.compile(r'chain_id="(\w+)"')
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]+)\}x')
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])")


@dataclass(frozen=True)
class Collective:
    """One collective, where it begins."""

    kind: str
    """Its opcode."""
    bytes: int
    """The larger of operands and results."""
    group_size: int
    """Chips that take part together."""
    handle: str | None
    """What its end names it by, where it is started and awaited apart, with room for compute
    between; None where it is waited for at once."""
    is_between_slices: bool = False
    """Whether it goes over the data-centre network (DCN) and not over the chips' own links."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether it is started and awaited apart."""
        return self.handle is not None

    @property
    def link_bytes(self) -> float:
        """Bytes that a chip must at least receive: its own share is there already."""
        share = self.bytes * (self.group_size - 1) / self.group_size
        if self.kind == "all-reduce":
            return 2 * share  # a reduce-scatter and an all-gather
        return self.bytes if self.kind == "collective-permute" else share


def executed(program: Program) -> Iterator[tuple[Executed, Collective]]:
    """Every collective of a step where it begins."""
    for each in program.executed():
        if (found := begins(program, each)) is not None:
            yield each, found


def begins(program: Program, executed: Executed) -> Collective | None:
    """The collective that begins at an instruction."""
    instruction = executed.instruction
    if instruction.opcode == "send":
        return _between_slices(executed)
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in KINDS:
        handle = instruction.name if instruction.opcode != opcode else None
        return _collective(opcode, instruction, executed, handle)
    if instruction.opcode != "fusion":
        return None
    if any(called.startswith("all-reduce-scatter") for called in instruction.called):
        inner = next(i for i in program.inside(instruction) if i.opcode in KINDS)
        return _collective("reduce-scatter", inner, executed, None)
    inner = _inner(program, instruction)
    if inner is None:
        return None
    chain = _targets(program, instruction)
    if "AsyncCollectiveStart" in chain:
        return _collective(inner.opcode, inner, executed, _chain(inner))
    if _chain(inner) is not None:
        return None  # a later link of a chain
    return _collective(inner.opcode, inner, executed, None)


def ends(program: Program, executed: Executed) -> str | None:
    """The handle of the collective that an instruction waits for, of those within a slice."""
    instruction = executed.instruction
    opcode = instruction.opcode
    if opcode.endswith("-done") and opcode.removesuffix("-done") in KINDS:
        return instruction.operands[0]
    if opcode == "fusion" and "AsyncCollectiveDone" in _targets(program, instruction):
        inner = _inner(program, instruction)
        return None if inner is None else _chain(inner)
    return None


def carried_bytes(program: Program, instruction: Instruction) -> int:
    """Bytes of a chain's buffers among operands and results of a fusion that only carries it."""
    inner = _inner(program, instruction)
    if inner is None or _chain(inner) is None:
        return 0
    return 2 * shape_bytes(inner.shape, only_hbm=True)


def _inner(program: Program, instruction: Instruction) -> Instruction | None:
    return next((i for i in program.inside(instruction) if i.opcode in KINDS), None)


def _chain(inner: Instruction) -> str | None:
    found = _CHAIN.search(inner.rest)
    return found[1] if found else None


def _targets(program: Program, instruction: Instruction) -> set[str]:
    return {inner.custom_call_target for inner in program.inside(instruction)} - {""}


def _collective(
    kind: str, stated: Instruction, executed: Executed, handle: str | None
) -> Collective:
    """`stated` has the groups; the fusion or line that is executed has the shapes."""
    known = executed.computation.instructions
    if stated.opcode == kind and stated is not executed.instruction:
        size = shape_bytes(stated.shape)
        if kind == "reduce-scatter":
            size *= _group_size(stated)
    else:
        operands = executed.instruction.operands
        read = sum(shape_bytes(known[name].shape) for name in operands if name in known)
        written = shape_bytes(executed.instruction.shape)
        if executed.instruction.opcode.endswith("-start"):
            written -= read  # the result holds operands too
        size = max(read, written)
    return Collective(kind, size, _group_size(stated), handle)


def _between_slices(executed: Executed) -> Collective | None:
    """What a `send` begins, None for one to anyone else."""
    instruction = executed.instruction
    kind, slices = _BETWEEN_SLICES.search(instruction.rest), _SLICES.search(instruction.rest)
    if kind is None or slices is None:
        return None
    size = shape_bytes(executed.computation.instructions[instruction.operands[0]].shape)
    opcode = kind[1].lower().replace("_", "-")
    group_size = len(slices[1].split(","))
    return Collective(opcode, size, group_size, instruction.name, is_between_slices=True)


def _group_size(stated: Instruction) -> int:
    found = _GROUPS.search(stated.rest)
    if not found:
        return 2  # a permute names pairs
    return int(found[2]) if found[2] else len(found[1].split(","))
