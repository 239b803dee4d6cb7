"""The time model of a compiled step, one chip, per executed instruction. Nothing is measured.

- Pallas calls: their static schedule (kernels.py) where it is known, else a bound: the larger of
  bytes at peak bandwidth and stated FLOPs at peak;
- matrix products: the compiler's estimated cycles at its clock (about 12 % above static schedules);
- everything else: bytes of HBM at 1.4 TB/s; the compiler's own estimate is two to five times too
  high for these, so it is kept beside and not summed;
- sorts, gathers and scatters: by bytes too, but no figure for them is trusted;
- copies to the host's memory and back: no figure is known, they are listed (`host_copies`);
- collectives: bytes over the links at the chip's published rate, see `exposed_s`.

Peak rates and the clock are a v6e's; docs of the model: estimating.md of the project's notes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pallas_ops.chips import Chip
from train.compile import collectives, hlo, kinds
from train.compile.collectives import Collective
from train.compile.kernels import KernelKey, kernel_key
from train.compile.static.step_time import CLOCK_HZ
from train.compile.traffic import hbm_bytes, host_bytes

MODEL_BYTES_PER_S = 1.4e12
"""Memory bandwidth that data movement is modelled with."""
LINK_BYTES_PER_S = 400e9
"""What a v6e chip receives over its four links: half of the 800 GB/s, both directions together, of
https://docs.cloud.google.com/tpu/docs/v6e."""


@dataclass(frozen=True)
class Work:
    """One instruction that takes time of its own."""

    executed: hlo.Executed
    """The instruction and how often it runs."""
    kind: str
    """Its kind of work."""
    bytes: int
    """HBM read and written, once."""
    seconds: float
    """By the model, once."""
    kernel: KernelKey | None
    """Which Pallas call it is."""
    untrusted: str | None
    """Sort, gather or scatter, if it does one."""
    is_rerun: bool
    """Whether it runs a part of a layer again for the backward pass."""

    @property
    def count(self) -> int:
        """Executions a step."""
        return self.executed.count

    @property
    def estimated_s(self) -> float:
        """The compiler's own estimate, once."""
        return self.executed.instruction.estimated_cycles / CLOCK_HZ


class StepModel:
    """The work, collectives and waits of one program."""

    def __init__(
        self, program: hlo.Program, chip: Chip, kernel_s: Mapping[KernelKey, float]
    ) -> None:
        self.program, self.chip, self.kernel_s = program, chip, kernel_s

    def work(self) -> Iterator[Work]:
        """Everything that a step runs, but for collectives and copies to the host and back."""
        for executed in self.program.executed():
            if (work := self._work(executed)) is not None:
                yield work

    def collectives(self) -> Iterator[tuple[hlo.Executed, Collective]]:
        """Every collective where it begins."""
        return collectives.executed(self.program)

    def host_copies(self) -> tuple[int, int]:
        """(copies between HBM and the host's memory a step, their bytes)."""
        num_copies = num_bytes = 0
        for executed in self.program.executed():
            size = host_bytes(executed.instruction) if kinds.is_work(executed.instruction) else 0
            num_copies += executed.count * (size > 0)
            num_bytes += executed.count * size
        return num_copies, num_bytes

    @property
    def exposed_s(self) -> float:
        """Seconds that the schedule waits for collectives, if links ran at their published rate.

        A chip's links are one queue: a collective begins when it is issued and the queue is free.
        Where its end is awaited and modelled compute has not filled the time, the rest is a wait;
        one that is not asynchronous is waited for at once. Latency, contention and whatever goes
        between slices are left out, so it is a bound from below.
        """
        return self._elapsed(self.program.entry)[1]

    def _elapsed(self, name: str) -> tuple[float, float]:
        """(seconds, of which waits) of one run of a computation."""
        computation = self.program.computations[name]
        now = waits = links_free = 0.0
        pending: dict[str, float] = {}
        for instruction in computation.instructions.values():
            executed = hlo.Executed(instruction, computation, 1)
            awaited = None
            if (found := collectives.begins(self.program, executed)) is not None:
                if found.is_between_slices:
                    continue
                links_free = max(links_free, now) + found.link_bytes / LINK_BYTES_PER_S
                if found.handle is None:
                    awaited = links_free
                else:
                    pending[found.handle] = links_free
            elif (handle := collectives.ends(self.program, executed)) is not None:
                awaited = pending.pop(handle, None)
            elif instruction.opcode == "while":
                turns = self.program.turns(instruction, computation)
                took, waited = self._elapsed(hlo.body_of(instruction))
                now, waits = now + turns * took, waits + turns * waited
            elif instruction.opcode in ("call", "conditional", "async-start"):
                for called in instruction.called:
                    took, waited = self._elapsed(called)
                    now, waits = now + took, waits + waited
            elif (work := self._work(executed)) is not None:
                now += work.seconds
            if awaited is not None and awaited > now:
                waits, now = waits + awaited - now, awaited
        return now, waits

    def _work(self, executed: hlo.Executed) -> Work | None:
        program, instruction = self.program, executed.instruction
        if not kinds.is_work(instruction) or collectives.ends(program, executed) is not None:
            return None
        if collectives.begins(program, executed) is not None or host_bytes(instruction):
            return None
        carried = collectives.carried_bytes(program, instruction)
        num_bytes = max(0, hbm_bytes(program, executed) - carried)
        key = kernel_key(executed)
        if key is not None:
            seconds = self.kernel_s.get(key)
            if seconds is None:
                seconds = max(
                    num_bytes / self.chip.hbm_bytes_per_s,
                    _stated_flops(instruction) / self.chip.peak_bf16_flops,
                )
        elif kinds.is_product(program, instruction):
            seconds = instruction.estimated_cycles / CLOCK_HZ
        else:
            seconds = num_bytes / MODEL_BYTES_PER_S
        return Work(
            executed,
            kinds.kind_of(program, instruction),
            num_bytes,
            seconds,
            key,
            kinds.untrusted(program, instruction),
            kinds.is_rerun(program, instruction),
        )


def _stated_flops(instruction: hlo.Instruction) -> int:
    found = re.search(r'"flops":"(\d+)"', instruction.rest)
    return int(found[1]) if found else 0
