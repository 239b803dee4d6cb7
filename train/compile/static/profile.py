"""One Pallas call compiled alone for a v6e, and the time that its schedule and steps give."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train.compile.static.dump import compile_with_dump
from train.compile.static.grid_steps import GridSteps, PallasCall
from train.compile.static.schedule import Schedule, read_schedule
from train.compile.static.step_time import (
    StepTime,
    Visit,
    kernel_regions,
    modelled_time,
    step_sums,
)
from train.compile.static.visits import find_visits, match_visits

_COMPILED_NAME = "pallas_kernel"
"""Of the kernel in the dump: the function's that holds it."""


@dataclass(frozen=True)
class CallProfile:
    """What the compiler's schedule of one call says. Modelled, not measured."""

    schedule: Schedule
    """The final schedule."""
    steps: GridSteps
    """The grid, step by step."""
    visits: tuple[Visit, ...]
    """When each region of the body runs."""
    has_every_visit: bool
    """Whether the compiler left as many regions as the body has. Where it did not, every region is
    charged to every step: an upper bound."""
    time: StepTime
    """Of one call."""
    compile_s: float
    """The compiler's time on this host."""

    @property
    def caveat(self) -> str:
        """What makes the time an upper bound of the schedule's, "" where nothing does."""
        if not self.has_every_visit:
            return "every region charged to every step"
        if any(visit.is_assumed for visit in self.visits):
            return "branches that data decides charged to every step"
        return ""

    @property
    def max_bundles(self) -> int:
        """Of the longest step."""
        return int(self.sums(np.ones(self.schedule.num_bundles)).max())

    def sums(self, per_bundle: np.ndarray) -> np.ndarray:
        """[num_steps] sum of a quantity over the bundles that each step executes."""
        return step_sums(self.schedule, self.steps, self.visits, per_bundle)


def lower_alone(call: PallasCall) -> bytes:
    """StableHLO of the call alone for a TPU, as MLIR bytecode."""
    import jax
    from jax._src.interpreters import mlir

    def pallas_kernel(*arrays: Any) -> tuple[Any, ...]:
        return call(*arrays)

    arguments = [jax.ShapeDtypeStruct(*each) for each in call.signature]
    parameters = mlir.LoweringParameters(
        for_export=True, export_ignore_forward_compatibility=False
    )  # the IR version that libtpu reads, see pallas_ops/bridge.py
    lowered = (
        jax.jit(pallas_kernel, keep_unused=True)
        .trace(*arguments)
        .lower(lowering_platforms=("tpu",), _private_parameters=parameters)
    )
    return mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))


def profile_call(call: PallasCall, flags: Sequence[str] = ()) -> CallProfile:
    """Compiles and models one call; `flags` are more of LIBTPU_INIT_ARGS.

    Raises ValueError where its steps or the trips of its loops cannot be known, RuntimeError where
    it does not compile.
    """
    steps = call.steps()
    visits = find_visits(call, steps)
    with tempfile.TemporaryDirectory(prefix="static_profile_") as folder:
        seconds = compile_with_dump(call.name, lower_alone(call), Path(folder), flags)
        schedule = read_schedule(Path(folder), _COMPILED_NAME)
    regions = kernel_regions(schedule)
    matched = match_visits(visits, len(regions))
    if matched is None and any(region.kind == "loop" for region in regions):
        raise ValueError(
            f"{call.name}: the compiler left {len(regions)} regions of the body's {len(visits)}, "
            "loops among them: their trips are not known"
        )
    visits = (
        matched
        if matched is not None
        else tuple(Visit(f"region {i}", lambda _: np.ones(())) for i in range(len(regions)))
    )
    bundles = step_sums(schedule, steps, visits, np.ones(schedule.num_bundles))
    loop = schedule.main_loop
    time = modelled_time(bundles, steps, schedule.num_bundles - (loop.last - loop.first))
    return CallProfile(schedule, steps, visits, matched is not None, time, seconds)
