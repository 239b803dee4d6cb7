"""What a compiled step says: memory, collectives, time by kind, kernels. Nothing is measured.

The sum of the times is the *modelled step*: a way to compare programs, not a step time. Its model
is model_time.py's, its kinds of work are kinds.py's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pallas_ops.chips import Chip
from train.compile import hlo
from train.compile.compiler import Program as CompiledProgram
from train.compile.kernels import KernelKey, KernelSchedule
from train.compile.model_time import LINK_BYTES_PER_S, StepModel, Work
from train.tables import format_bytes


@dataclass(frozen=True)
class Workload:
    """What one step does on one chip."""

    tokens: int
    """Of the batch."""
    flops: int
    """Counted for training, without recomputation (torch_gemma4/accounting.py)."""


@dataclass(frozen=True)
class KindTime:
    """One kind of work of a step."""

    kind: str
    """Its name."""
    count: int
    """Instructions executed."""
    bytes: int
    """HBM read and written."""
    modelled_s: float
    """By the model."""
    compiler_s: float
    """By the compiler's raw estimate; it has none for kernels, and its figures for what moves data
    are two to five times too high."""


@dataclass(frozen=True)
class KernelTime:
    """One Pallas call of a step, at one set of shapes."""

    name: str
    """Of the kernel."""
    shapes: str
    """Of its results."""
    count: int
    """Executions a step."""
    modelled_s: float
    """Of all of them."""
    source: str
    """How it came about: a static schedule, or the bound that stands in for it."""
    is_uncertain: bool
    """Whether it is a bound, from below or from above."""
    bundles: int | None
    """Of the longest grid step; None without a schedule."""
    num_steps: int | None
    """Grid steps of one call; None without a schedule."""


@dataclass(frozen=True)
class CollectiveUse:
    """One kind of collective."""

    kind: str
    """Its opcode, and whether it goes between slices."""
    count: int
    """Collectives a step, each counted once however many instructions carry it."""
    bytes: int
    """The larger of operands and results, added up."""
    num_asynchronous: int
    """Of them, started and awaited apart, with compute between."""
    link_s: float | None
    """Time on the chip's links at their published rate: a lower bound. None between slices."""


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
    """By kind of work, without collectives."""
    kernels: tuple[KernelTime, ...]
    """Pallas calls; their times are in their kinds'."""
    routing: str | None
    """What the kernels that it concerns are modelled at."""
    modelled_step_s: float
    """Sum of the kinds. Not a step time."""
    rerun_s: float
    """Of modelled_step_s, what layers run again for the backward pass, as far as the compiler has
    kept the name of it."""
    exposed_collectives_s: float
    """What compute does not hide of the collectives by the link model: a lower bound, not in
    modelled_step_s."""
    modelled_tokens_per_s: float | None
    """A chip, if a step took modelled_step_s; None where the workload is not given."""
    modelled_mfu: float | None
    """Counted FLOPs over peak in modelled_step_s."""
    unknowns: tuple[str, ...]
    """What the modelled step leaves out, or has by a figure that is not trusted."""
    compile_s: float
    """The compiler's time on this host."""

    def to_dict(self) -> dict[str, Any]:
        """For report.json."""
        return asdict(self)


def make_report(
    preset: str,
    topology: str,
    program: CompiledProgram,
    chip: Chip,
    *,
    schedules: Sequence[KernelSchedule] = (),
    workload: Workload | None = None,
    routing: str | None = None,
) -> Report:
    """Reads one compiled program. `schedules` are those of its Pallas calls, at `routing`; a call
    without one is modelled by a bound."""
    module = hlo.Program(program.hlo)
    by_key = {schedule.key: schedule for schedule in schedules}
    seconds = {key: s.seconds for key, s in by_key.items() if s.seconds is not None}
    model = StepModel(module, chip, seconds)
    work = list(model.work())
    kernels = _kernels(work, by_key)
    times = _by_kind(work)
    step = sum(time.modelled_s for time in times)
    exposed = model.exposed_s
    collectives = _collectives(model)
    return Report(
        preset=preset,
        topology=topology,
        fits=program.peak_bytes <= chip.hbm_bytes,
        memory={
            "argument": program.argument_bytes,
            "output": program.output_bytes,
            "alias": program.alias_bytes,
            "temp": program.temp_bytes,
            "code": program.code_bytes,
            "peak": program.peak_bytes,
            "available": chip.hbm_bytes,
        },
        collectives=collectives,
        time_by_kind=times,
        kernels=kernels,
        routing=routing,
        modelled_step_s=step,
        rerun_s=sum(each.count * each.seconds for each in work if each.is_rerun),
        exposed_collectives_s=exposed,
        modelled_tokens_per_s=workload and step and workload.tokens / step,
        modelled_mfu=workload and step and workload.flops / step / chip.peak_bf16_flops,
        unknowns=(
            "waits for collectives that compute does not hide: at least "
            f"{1e3 * exposed:,.1f} ms if each link queue ran at {LINK_BYTES_PER_S / 1e9:.0f} GB/s",
            *(
                f"{use.kind}: {use.count} executed, {format_bytes(use.bytes)}, no time for it here"
                for use in collectives
                if use.link_s is None
            ),
            *_host_copies(model),
            *_untrusted(work),
            *(
                f"kernel {time.name}, {time.count} executed: {time.source}"
                for time in kernels
                if time.is_uncertain
            ),
            *(f"trip count of {name}, counted once" for name in module.unknown_loops),
        ),
        compile_s=program.compile_s,
    )


def _by_kind(work: Sequence[Work]) -> tuple[KindTime, ...]:
    rows: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    for each in work:
        row = rows[each.kind]
        row[0] += each.count
        row[1] += each.count * each.bytes
        row[2] += each.count * each.seconds
        row[3] += each.count * each.estimated_s
    found = (KindTime(kind, int(n), int(size), *rest) for kind, (n, size, *rest) in rows.items())
    return tuple(sorted(found, key=lambda time: -time.modelled_s))


def _kernels(
    work: Sequence[Work], schedules: dict[KernelKey, KernelSchedule]
) -> tuple[KernelTime, ...]:
    rows: dict[KernelKey, list[Work]] = defaultdict(list)
    for each in work:
        if each.kernel is not None:
            rows[each.kernel].append(each)
    found = []
    for key, calls in rows.items():
        schedule = schedules.get(key)
        if schedule is None:
            name = calls[0].executed.instruction.name
            schedule = KernelSchedule(name, key, None, "no schedule was made")
        profile = schedule.profile
        found.append(
            KernelTime(
                name=schedule.name,
                shapes=", ".join(f"{t}[{'x'.join(map(str, dims))}]" for t, dims in key[1]),
                count=sum(each.count for each in calls),
                modelled_s=sum(each.count * each.seconds for each in calls),
                source=schedule.source,
                is_uncertain=schedule.unknown != "",
                bundles=None if profile is None else profile.max_bundles,
                num_steps=None if profile is None else profile.steps.num_steps,
            )
        )
    return tuple(sorted(found, key=lambda time: -time.modelled_s))


def _collectives(model: StepModel) -> tuple[CollectiveUse, ...]:
    rows: dict[str, list[float | None]] = defaultdict(lambda: [0, 0, 0, 0.0])
    for executed, collective in model.collectives():
        is_between = collective.is_between_slices
        row = rows[f"{collective.kind} between slices" if is_between else collective.kind]
        row[0] += executed.count
        row[1] += executed.count * collective.bytes
        row[2] += executed.count * collective.is_asynchronous
        if is_between:
            row[3] = None
        else:
            row[3] += executed.count * collective.link_bytes / LINK_BYTES_PER_S
    return tuple(CollectiveUse(kind, *row) for kind, row in sorted(rows.items()))


def _host_copies(model: StepModel) -> list[str]:
    count, size = model.host_copies()
    if not count:
        return []
    return [
        f"copies between HBM and the host's memory: {count:,} executed, {format_bytes(size)}, no "
        "time for it here"
    ]


def _untrusted(work: Sequence[Work]) -> list[str]:
    rows: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for each in work:
        if each.untrusted is not None:
            row = rows[each.untrusted]
            row[0] += each.count
            row[1] += each.count * each.bytes
            row[2] += each.count * each.seconds
    return [
        f"{name}: {int(n):,} executed, {size / 1e9:,.2f} GB, in the sum by bytes alone "
        f"({1e3 * seconds:,.1f} ms)"
        for name, (n, size, seconds) in sorted(rows.items())
    ]
