"""What a compiled step says: memory, collectives, formatting, time by kind. Nothing is measured.

The time model (one chip, one step), per executed instruction:

- matrix products: the compiler's estimated cycles at 1.75 GHz;
- every other TensorCore instruction: bytes read and written at 1.4 TB/s (the compiler's own
  estimate is two to five times too high for these, so it is shown and not summed);
- Pallas kernels: a bound from their shapes, operands and results once at peak bandwidth; their
  schedules are the business of benchmarks/kernel_profile.py;
- collectives, sorts, gathers and scatters: listed with counts and bytes, not summed: no figure is
  known.

The sum is the *modelled step*: a way to compare programs, not a step time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from pallas_ops.chips import Chip
from train.compile import hlo
from train.compile.compiler import Program as CompiledProgram

CLOCK_HZ = 1.75e9
"""Of a v6e TensorCore, from its peak: 918e12 FLOP/s over 524,288 FLOP a cycle."""
MODEL_BYTES_PER_S = 1.4e12
"""Memory bandwidth that data movement is modelled with."""

_UNKNOWN = ("sort", "gather", "scatter")


@dataclass(frozen=True)
class KindTime:
    """One kind of work of a step."""

    kind: str
    """Its name."""
    count: int
    """Instructions executed."""
    bytes: int
    """Read and written."""
    modelled_s: float | None
    """By the model; None where no model is trusted."""


@dataclass(frozen=True)
class CollectiveUse:
    """One kind of collective."""

    kind: str
    """Its opcode."""
    count: int
    """Executions a step."""
    bytes: int
    """The larger of operands and results, added up."""
    num_asynchronous: int
    """Of them, started and awaited apart or fused with compute."""


@dataclass(frozen=True)
class Report:
    """What the compiler says of one step on one chip."""

    preset: str
    """Name of the run."""
    topology: str
    """Name of the slice."""
    fits: bool
    """Whether peak_bytes is at most the chip's memory."""
    memory: dict[str, int]
    """Bytes: argument, output, alias, temp, code, peak, available."""
    collectives: tuple[CollectiveUse, ...]
    """By kind."""
    time_by_kind: tuple[KindTime, ...]
    """By kind of work."""
    unknowns: tuple[str, ...]
    """What the modelled step leaves out."""
    compile_s: float
    """The compiler's time on this host."""

    @property
    def modelled_step_s(self) -> float:
        """Sum of what is modelled, in seconds. Not a step time."""
        return sum(kind.modelled_s or 0.0 for kind in self.time_by_kind)

    def to_dict(self) -> dict[str, Any]:
        """For report.json."""
        return asdict(self) | {"modelled_step_s": self.modelled_step_s}


def make_report(preset: str, topology: str, program: CompiledProgram, chip: Chip) -> Report:
    """Reads one compiled program."""
    module = hlo.Program(program.hlo)
    kinds: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    collectives: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for executed in module.executed():
        kind = _kind(module, executed.instruction)
        if kind is None:
            continue
        read = module.operand_bytes(executed)
        written = hlo.shape_bytes(executed.instruction.shape)
        collective = _collective(module, executed.instruction)
        if collective is not None:
            entry = collectives[collective]
            entry[0] += executed.count
            entry[1] += executed.count * max(read, written)
            entry[2] += executed.count * _is_asynchronous(executed)
            continue
        entry = kinds[kind]
        entry[0] += executed.count
        entry[1] += executed.count * (read + written)
        entry[2] += executed.count * _seconds(kind, executed.instruction, read + written, chip)
    peak = program.peak_bytes
    memory = {
        "argument": program.argument_bytes,
        "output": program.output_bytes,
        "alias": program.alias_bytes,
        "temp": program.temp_bytes,
        "code": program.code_bytes,
        "peak": peak,
        "available": chip.hbm_bytes,
    }
    times = tuple(
        KindTime(kind, int(n), int(size), None if kind in _UNKNOWN else seconds)
        for kind, (n, size, seconds) in sorted(kinds.items(), key=lambda item: -item[1][2])
    )
    return Report(
        preset=preset,
        topology=topology,
        fits=peak <= chip.hbm_bytes,
        memory=memory,
        collectives=tuple(CollectiveUse(k, *v) for k, v in sorted(collectives.items())),
        time_by_kind=times,
        unknowns=(
            "waits for collectives that compute does not hide",
            *(f"{kind.kind}: {kind.count} executed" for kind in times if kind.kind in _UNKNOWN),
            *(f"trip count of {name}, counted once" for name in module.unknown_loops),
        ),
        compile_s=program.compile_s,
    )


_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all"}
_FREE |= {"while", "call", "conditional", "async-start", "partition-id", "replica-id"}
"""Opcodes that move no bytes, or whose insides are counted instead."""


def _kind(module: hlo.Program, instruction: hlo.Instruction) -> str | None:
    """The kind of work of an instruction, None where it is no work."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done"):
        return None
    if opcode == "custom-call":
        return f"kernel {_kernel_name(instruction)}"
    inside = {inner.opcode for inner in module.inside(instruction)} or {opcode}
    if inside & {"convolution", "dot"}:
        return "matrix products"
    for unknown in _UNKNOWN:
        if unknown in inside:
            return unknown
    if inside - {"parameter", "constant", "tuple", "get-tuple-element"} <= hlo.FORMATTING:
        return "data formatting"
    return "other vector work"


def _kernel_name(instruction: hlo.Instruction) -> str:
    """A Pallas kernel's own name, or the target of another custom call."""
    if 'custom_call_target="tpu_custom_call"' in instruction.rest:
        found = re.search(r'op_name="[^"]*jit\((\w+)\)[^"]*"', instruction.rest)
        return found[1].removesuffix("_sharded") if found else instruction.name
    found = re.search(r'custom_call_target="([\w.$\-]+)"', instruction.rest)
    return found[1] if found else instruction.name


def _collective(module: hlo.Program, instruction: hlo.Instruction) -> str | None:
    """Which collective an instruction is. TPU writes a reduce-scatter as a fusion of its own."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in hlo.COLLECTIVES:
        return opcode
    if any(called.startswith("all-reduce-scatter") for called in instruction.called):
        return "reduce-scatter"
    inside = {inner.opcode for inner in module.inside(instruction)}
    return next((kind for kind in hlo.COLLECTIVES if kind in inside), None)


def _is_asynchronous(executed: hlo.Executed) -> bool:
    instruction = executed.instruction
    started = instruction.opcode.endswith("-start") or instruction.opcode == "fusion"
    return started and "all-reduce-scatter" not in instruction.rest


def _seconds(kind: str, instruction: hlo.Instruction, num_bytes: int, chip: Chip) -> float:
    if kind == "matrix products":
        return instruction.estimated_cycles / CLOCK_HZ
    if kind.startswith("kernel "):
        return num_bytes / chip.hbm_bytes_per_s
    return num_bytes / MODEL_BYTES_PER_S
