"""The largest buffers of a step, under names of this project.

The compiler names a buffer by the instruction that writes it. What people know is the parameter, or
the file of ours that asked for the instruction (train/compile/scopes.py) and the operation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.compile.hlo import OTHER_SPACE, Instruction

if TYPE_CHECKING:
    from train.compile.assignment import LiveBuffer
    from train.compile.exhausted import Allocation
    from train.compile.hlo import Program

_MODULE = re.compile(r"(?:torch_gemma4|pallas_ops|train)\.([\w.]+?)(?:\.op)?(?:\.\d+)?")
_PASSED_ON = {"bitcast", "copy", "copy-done", "reshape", "optimization-barrier", "async-done"}
"""Opcodes whose result is named by their first operand."""


@dataclass(frozen=True)
class Buffer:
    """Buffers of one name and shape."""

    name: str
    """Parameter or input, or module and operation that write it."""
    shape: str
    """On one chip, such as bf16[2,1024,262144]."""
    bytes: int
    """Of one of them, with the padding of its tiles."""
    count: int
    """How many of them."""


def buffers_at_peak(
    program: Program, live: Sequence[LiveBuffer], argument_names: Mapping[int, str], count: int = 5
) -> tuple[Buffer, ...]:
    """The `count` largest of the buffers in HBM that live when memory use is highest.

    Args:
        program: optimised.
        live: of its buffer assignment.
        argument_names: name of the entry's parameter i.
    """
    namer = _Namer(program, argument_names)
    found = []
    for buffer in live:
        instruction = namer.instructions.get(buffer.instruction)
        if instruction is None:
            found.append((buffer.instruction, "", buffer.bytes))
            continue
        shape = _part(instruction.shape, buffer.index)
        if OTHER_SPACE.search(shape) is None:
            name = namer.name(buffer.instruction, buffer.index)
            found.append((name, plain_shape(shape), buffer.bytes))
    return _largest(found, count)


def buffers_of_message(
    allocations: Iterable[Allocation], argument_names: Mapping[int, str], count: int = 5
) -> tuple[Buffer, ...]:
    """The same from the list that comes with RESOURCE_EXHAUSTED."""
    found = []
    for allocation in allocations:
        parameter = re.search(r"\bparameter\((\d+)\)", allocation.label)
        number = int(parameter[1]) if parameter else -1
        opcode = re.search(r" = ([\w\-]+)\(", allocation.label)
        otherwise = opcode[1] if opcode else allocation.label
        name = argument_names.get(number) or our_name(allocation.op_name, otherwise)
        found.append((name, plain_shape(allocation.shape), allocation.bytes))
    return _largest(found, count)


def our_name(op_name: str, otherwise: str) -> str:
    """HLO's op_name, such as call.3/torch_gemma4.loss.1/aten__mm.7, as "loss: mm".

    Where no file of ours is in it, the jitted function or the device loop is named; `otherwise`
    stands for an operation that is not.
    """
    parts = [part for part in op_name.split("/") if part and not part.startswith("call.")]
    operation = re.sub(r"\.\d+$", "", parts[-1]) if parts else otherwise
    operation = operation.removeprefix("aten__").removeprefix("xla__").replace("_", " ").strip()
    modules = [found[1] for part in parts if (found := _MODULE.fullmatch(part))]
    jitted = [found[1] for part in parts if (found := re.fullmatch(r"jit\((\w+)\)", part))]
    loops = ["layer loop" for part in parts if part.startswith("xla__layer_loop")]
    for place in (*modules[-1:], *jitted[:1], *loops[:1]):
        place = place.removesuffix("_sharded")
        return place if place == operation else f"{place}: {operation}"
    return operation


def plain_shape(shape: str) -> str:
    """A shape without its layout."""
    return re.sub(r"\{[^}]*\}", "", shape)


class _Namer:
    """Finds what writes a part of an instruction's result."""

    def __init__(self, program: Program, argument_names: Mapping[int, str]) -> None:
        self.program, self.argument_names = program, argument_names
        self.instructions = {
            name: instruction
            for computation in program.computations.values()
            for name, instruction in computation.instructions.items()
        }

    def name(self, name: str, index: tuple[int, ...]) -> str:
        return self._name(name, index, seen=set())

    def _name(self, name: str, index: tuple[int, ...], seen: set[tuple[str, tuple]]) -> str:
        instruction = self.instructions[name]
        own = our_name(instruction.op_name, instruction.opcode)
        if (name, index) in seen:
            return own
        seen.add((name, index))
        if instruction.opcode == "parameter" and name in self._entry:
            number = int(instruction.rest.split(")")[0])
            return self.argument_names.get(number, f"argument {number}")
        below = self._below(instruction, index)
        return self._name(*below, seen) if below else own

    def _below(
        self, instruction: Instruction, index: tuple[int, ...]
    ) -> tuple[str, tuple[int, ...]] | None:
        """What a result is handed on from, None if the instruction itself writes it."""
        operands = [name for name in instruction.operands if name in self.instructions]
        if instruction.opcode == "while" and index:
            # What a loop carries is written in its body, or comes in from outside.
            body = self.program.computations[re.search(r"body=%([\w.\-]+)", instruction.rest)[1]]
            root = next(i for i in reversed(body.instructions.values()))
            written = root.operands[index[0]] if root.opcode == "tuple" else None
            return (written, index[1:]) if written else None
        if instruction.opcode == "tuple" and index:
            return operands[index[0]], index[1:]
        if instruction.opcode == "get-tuple-element" and operands:
            number = int(re.search(r"index=(\d+)", instruction.rest)[1])
            source = self.instructions[operands[0]]
            return None if source.opcode == "parameter" else (operands[0], (number, *index))
        if instruction.opcode in _PASSED_ON and operands and not instruction.op_name:
            return operands[0], index
        return None

    @property
    def _entry(self) -> Mapping[str, Instruction]:
        return self.program.computations[self.program.entry].instructions


def _part(shape: str, index: tuple[int, ...]) -> str:
    """One array of a tuple's shape; the whole where there is no index. Tuples here are flat."""
    if not index:
        return shape
    arrays = re.findall(r"\w+\[[\d,]*\](?:\{[^{}]*\})?", shape)
    return arrays[index[0]] if index[0] < len(arrays) else shape


def _largest(found: Iterable[tuple[str, str, int]], count: int) -> tuple[Buffer, ...]:
    buffers = [Buffer(*each, times) for each, times in Counter(found).items()]
    return tuple(sorted(buffers, key=lambda buffer: (-buffer.bytes, buffer.name))[:count])
