"""The time model of a pipelined kernel: sum over grid steps of max(compute, DMA).

    T = prologue + fetch(0) + sum_s max(bundles(s) / clock, (fetch(s+1) + write(s-1)) / bandwidth)
        + write(last)

Mosaic's pipeline, double-buffered, issues the fetch of step s+1 before step s computes, and waits
for the write of step s-1 after it: those are the copies in flight during step s. A bundle is a
cycle: no stalls, so the result is a lower bound of compute; full bandwidth, so of DMA too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pallas_ops.chips import V6E
from train.compile.static.grid_steps import GridSteps
from train.compile.static.schedule import Region, Schedule, descendants

CLOCK_HZ = 1.75e9
"""v6e, inferred: 918e12 FLOP/s are 2 matrix units x 2 x 16 x 256 x 256 / 8 cycles at 1.751 GHz."""


EVERY_STEP = "every step"


@dataclass(frozen=True)
class Visit:
    """How often the steps of a kernel run one region of its body: a `pl.when` or an inner loop."""

    name: str
    """What it does, for reports."""
    times: Callable[[GridSteps], np.ndarray]
    """[num_steps] times that the region runs, each time that the region around it does."""
    is_static_loop: bool = False
    """Whether it is a loop of a known length, which the compiler may unroll."""
    is_assumed: bool = False
    """Whether data decides it, and it is taken to run."""


@dataclass(frozen=True)
class StepTime:
    """Modelled seconds of one kernel."""

    total: float
    """Everything."""
    compute: float
    """Bundles alone."""
    dma: float
    """Copies alone."""
    num_dma_bound: int
    """Steps whose copies last longer than their bundles."""


def kernel_regions(schedule: Schedule) -> list[Region]:
    """Regions of the kernel's own body, outermost first, in program order.

    Directly inside the grid loop are the guards of Mosaic's pipeline: the longest is the body, the
    others issue copies; every step is charged with all of them.
    """
    return descendants(_body(schedule))


def _body(schedule: Schedule) -> Region:
    return max(schedule.main_loop.children, key=lambda guard: guard.last - guard.first)


def step_sums(
    schedule: Schedule, steps: GridSteps, visits: tuple[Visit, ...], per_bundle: np.ndarray
) -> np.ndarray:
    """[num_steps] sum of a quantity over the bundles that each step executes. Raises as
    `region_sums`."""
    base, *own = region_sums(schedule, visits, per_bundle).values()
    regions = kernel_regions(schedule)
    sums = np.full(steps.num_steps, base)
    runs: list[np.ndarray] = []
    for i, (region, visit) in enumerate(zip(regions, visits, strict=True)):
        times = np.broadcast_to(visit.times(steps), sums.shape).astype(np.float64)
        for outer in range(i - 1, -1, -1):
            if region.last <= regions[outer].last:  # the innermost region around it
                times = times * runs[outer]
                break
        runs.append(times)
        sums += times * own[i]
    return sums


def region_sums(
    schedule: Schedule, visits: tuple[Visit, ...], per_bundle: np.ndarray
) -> dict[str, float]:
    """Sum of a quantity over the bundles of each region without those inside it, by its visit's
    name; first, as "every step", over those of the grid loop that are in none.

    Raises ValueError when `visits` are not as many as the regions that the compiler left.
    """
    regions = kernel_regions(schedule)
    if len(regions) != len(visits):
        found = [f"{each.kind} of {each.last - each.first} bundles" for each in regions]
        raise ValueError(
            f"the schedule has regions {found} but the kernel's entry names "
            f"{[visit.name for visit in visits]}; give `visits` one entry a region, in this order"
        )
    loop, body = schedule.main_loop, _body(schedule)
    base = per_bundle[loop.first : loop.last].sum() - per_bundle[body.first : body.last].sum()
    base = float(base) + body.own(per_bundle)
    own = [region.own(per_bundle) for region in regions]
    return {EVERY_STEP: base} | {v.name: each for v, each in zip(visits, own, strict=True)}


def modelled_time(bundles: np.ndarray, steps: GridSteps, fixed_bundles: int) -> StepTime:
    """Applies the model to bundles [num_steps] and the copies of `steps`."""
    compute = bundles / CLOCK_HZ
    in_flight = np.zeros(steps.num_steps)
    in_flight[:-1] += steps.fetched[1:]
    in_flight[1:] += steps.written[:-1]
    dma = in_flight / V6E.hbm_bytes_per_s
    edges = (steps.fetched[0] + steps.written[-1]) / V6E.hbm_bytes_per_s
    fixed = fixed_bundles / CLOCK_HZ
    return StepTime(
        total=float(fixed + edges + np.maximum(compute, dma).sum()),
        compute=float(fixed + compute.sum()),
        dma=float(edges + dma.sum()),
        num_dma_bound=int((dma > compute).sum()),
    )
