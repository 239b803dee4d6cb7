"""Collectives of an optimised HLO program: each counted once, with what it sends over the links.

TPU writes one collective in several ways: a plain opcode; a pair of -start and -done; a fusion that
calls %all-reduce-scatter; and a chain of fusions, the first with an AsyncCollectiveStart inside,
the last with an AsyncCollectiveDone, and compute between them that carries the transfer along.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from train.compile.hlo import Executed, Instruction, Program, shape_bytes

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

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
    is_asynchronous: bool
    """Whether it is started and awaited apart, with room for compute between."""

    @property
    def link_bytes(self) -> float:
        """Bytes that a chip must at least receive: its own share is there already."""
        share = self.bytes * (self.group_size - 1) / self.group_size
        if self.kind == "all-reduce":
            return 2 * share  # a reduce-scatter and an all-gather
        return self.bytes if self.kind == "collective-permute" else share


def begins(program: Program, executed: Executed) -> Collective | None:
    """The collective that begins at an instruction."""
    instruction = executed.instruction
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in KINDS:
        return _collective(opcode, instruction, executed, instruction.opcode != opcode)
    if instruction.opcode != "fusion":
        return None
    if any(called.startswith("all-reduce-scatter") for called in instruction.called):
        inner = next(i for i in program.inside(instruction) if i.opcode in KINDS)
        return _collective("reduce-scatter", inner, executed, is_asynchronous=False)
    inner = _inner(program, instruction)
    if inner is None:
        return None
    chain = _targets(program, instruction)
    if "AsyncCollectiveStart" in chain:
        return _collective(inner.opcode, inner, executed, is_asynchronous=True)
    if "chain_id" in inner.rest:
        return None  # a later link of a chain
    return _collective(inner.opcode, inner, executed, is_asynchronous=False)


def ends(program: Program, executed: Executed) -> bool:
    """Whether an instruction waits for a collective that began before."""
    instruction = executed.instruction
    opcode = instruction.opcode
    if opcode.endswith("-done"):
        return opcode.removesuffix("-done") in KINDS
    return opcode == "fusion" and "AsyncCollectiveDone" in _targets(program, instruction)


def carried_bytes(program: Program, instruction: Instruction) -> int:
    """Bytes of a chain's buffers among operands and results of a fusion that only carries it."""
    inner = _inner(program, instruction)
    if inner is None or "chain_id" not in inner.rest:
        return 0
    return 2 * shape_bytes(inner.shape, only_hbm=True)


def _inner(program: Program, instruction: Instruction) -> Instruction | None:
    return next((i for i in program.inside(instruction) if i.opcode in KINDS), None)


def _targets(program: Program, instruction: Instruction) -> set[str]:
    return {inner.custom_call_target for inner in program.inside(instruction)} - {""}


def _collective(
    kind: str, stated: Instruction, executed: Executed, is_asynchronous: bool
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
    return Collective(kind, size, _group_size(stated), is_asynchronous)


def _group_size(stated: Instruction) -> int:
    found = _GROUPS.search(stated.rest)
    if not found:
        return 2  # a permute names pairs
    return int(found[2]) if found[2] else len(found[1].split(","))
