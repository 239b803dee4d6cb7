"""Reads an optimised HLO program: what is executed, how often, and how many bytes it moves.

A program is text. Instructions are counted once for every time the computation that holds them
runs: the entry once, a `while` body as often as its loop turns, a called computation as often as
its caller. What is inside a fusion is no instruction of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip
ARRAY = re.compile(r"\b(" + "|".join(_BYTES) + r")\[([\d,]*)\](\{[^{}]*\})?")
"""One array's dtype, dimensions and layout in a shape."""
OTHER_SPACE = re.compile(r"S\([1-9]\d*\)")
"""A memory other than HBM, in a layout."""
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.+?) ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|async_computation)=%([\w.\-]+)")
_TRIP_COUNT = re.compile(r'known_trip_count"?:\{"?n"?:"(\d+)"')
_BODY = re.compile(r"body=%([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SOURCE_FILE = re.compile(r'source_file="([^"]*)"')
_INDEX = re.compile(r"index=(\d+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all"}
FREE |= {"while", "call", "conditional", "async-start", "partition-id", "replica-id"}
"""Opcodes that move no bytes, or whose insides are counted instead."""


def shape_bytes(text: str, *, only_hbm: bool = False) -> int:
    """Bytes of every array named in a piece of HLO, without tiling's padding; with `only_hbm`, of
    those that its layouts put in no other memory."""
    total = 0
    for dtype, dims, layout in ARRAY.findall(text):
        if only_hbm and OTHER_SPACE.search(layout):
            continue
        size = _BYTES[dtype]
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        total += size
    return total


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    """Without the percent sign."""
    shape: str
    """Of its result, as text."""
    opcode: str
    """As HLO spells it."""
    rest: str
    """Operands and attributes, as text."""
    is_root: bool = False
    """Whether it is its computation's result."""

    @property
    def called(self) -> list[str]:
        """Computations that it names."""
        return _CALLED.findall(self.rest)

    @property
    def operands(self) -> list[str]:
        """Names of its operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.split(")", 1)[0])

    @property
    def custom_call_target(self) -> str:
        """What a custom call calls, "" for other instructions."""
        found = _TARGET.search(self.rest)
        return found[1] if found else ""

    @property
    def op_name(self) -> str:
        """Names of the program that was traced, outermost first; "" where the compiler has none."""
        found = _OP_NAME.search(self.rest)
        return found[1] if found else ""

    @property
    def source_file(self) -> str:
        """Python file that asked for it; "" where it is not known."""
        found = _SOURCE_FILE.search(self.rest)
        return found[1] if found else ""

    @property
    def estimated_cycles(self) -> int:
        """The compiler's own estimate, 0 where it gives none."""
        found = _CYCLES.search(self.rest)
        return int(found[1]) if found else 0


def body_of(loop: Instruction) -> str:
    """Name of the computation that a `while` repeats."""
    return _BODY.search(loop.rest)[1]


def _literal(instruction: Instruction) -> int | None:
    """The value of an integer constant."""
    found = re.match(r"(\d+)\)", instruction.rest)
    return int(found[1]) if found and instruction.opcode == "constant" else None


@dataclass
class Computation:
    """A named list of instructions."""

    name: str
    """Without the percent sign."""
    instructions: dict[str, Instruction] = field(default_factory=dict)
    """By name, in the order of the schedule."""


@dataclass(frozen=True)
class Executed:
    """An instruction and how often a step runs it."""

    instruction: Instruction
    """The line."""
    computation: Computation
    """Where it stands."""
    count: int
    """Executions a step."""


class Program:
    """A parsed module."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        current = None
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations[header[2]] = Computation(header[2])
                if header[1]:
                    self.entry = header[2]
            elif current is not None and (found := _INSTRUCTION.match(line)):
                root, *fields = found.groups()
                instruction = Instruction(*fields, is_root=root is not None)
                current.instructions[instruction.name] = instruction
        if not self.entry:
            raise ValueError("no ENTRY computation in this text: give an HLO module")

    def trip_count(self, loop: Instruction, holder: Computation) -> int | None:
        """Turns of a `while` of `holder`: as the compiler says, or from the literal that its
        counter starts at (1 where a turn was peeled off) to the one its condition compares with, by
        steps of one, as every loop here counts."""
        if found := _TRIP_COUNT.search(loop.rest):
            return int(found[1])
        condition = self.computations[re.search(r"condition=%([\w.\-]+)", loop.rest)[1]]
        bounds = [_literal(each) for each in condition.instructions.values()]
        bounds = [bound for bound in bounds if bound is not None]
        counters = [
            int(found[1])
            for each in condition.instructions.values()
            if each.opcode == "get-tuple-element" and (found := _INDEX.search(each.rest))
        ]
        compares = [
            each.opcode == "compare" and "direction=LT" in each.rest
            for each in condition.instructions.values()
            if each.is_root
        ]
        if len(bounds) != 1 or len(counters) != 1 or compares != [True]:
            return None
        initial = holder.instructions.get(loop.operands[0])
        if initial is None or initial.opcode != "tuple":
            return None
        start = holder.instructions.get(initial.operands[counters[0]])
        while start is not None and start.opcode in ("copy", "bitcast"):
            start = holder.instructions.get(start.operands[0])
        first = None if start is None else _literal(start)
        return None if first is None else max(0, bounds[0] - first)

    def turns(self, loop: Instruction, holder: Computation) -> int:
        """`trip_count`, and one where that is not known (`unknown_loops`)."""
        known = self.trip_count(loop, holder)
        return 1 if known is None else known

    @cached_property
    def unknown_loops(self) -> list[str]:
        """Loops without a known trip count; they are counted as one turn."""
        return [
            instruction.name
            for computation in self.computations.values()
            for instruction in computation.instructions.values()
            if instruction.opcode == "while" and self.trip_count(instruction, computation) is None
        ]

    def executed(self) -> Iterator[Executed]:
        """Every instruction that a step runs outside fusions, with its count."""
        yield from self._walk(self.entry, 1)

    def _walk(self, name: str, count: int) -> Iterator[Executed]:
        computation = self.computations[name]
        for instruction in computation.instructions.values():
            yield Executed(instruction, computation, count)
            if instruction.opcode == "while":
                turns = self.turns(instruction, computation)
                yield from self._walk(body_of(instruction), count * turns)
            elif instruction.opcode in ("call", "conditional", "async-start"):
                for called in instruction.called:
                    yield from self._walk(called, count)

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions of a fusion, nested ones too; none for other instructions."""
        if instruction.opcode != "fusion":
            return
        for called in instruction.called:
            for inner in self.computations[called].instructions.values():
                yield inner
                yield from self.inside(inner)
