"""One Pallas call compiled alone for a v6e, and the time that its schedule and steps give."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from train.compile.static.dump import compile_with_dump
from train.compile.static.grid_steps import PallasCall
from train.compile.static.kernel_steps import KernelSteps, PipelineSteps
from train.compile.static.own_copies import OWN_COPIES
from train.compile.static.schedule import Schedule, read_schedule
from train.compile.static.step_time import StepTime, Visit, kernel_regions
from train.compile.static.visits import find_visits, match_visits

_COMPILED_NAME = "pallas_kernel"
"""Of the kernel in the dump: the function's that holds it."""


@dataclass(frozen=True)
class CallProfile:
    """What the compiler's schedule of one call says. Modelled, not measured."""

    schedule: Schedule
    """The final schedule."""
    steps: KernelSteps
    """What its steps run and copy."""
    caveat: str
    """What makes the time an upper bound of the schedule's, "" where nothing does."""
    time: StepTime
    """Of one call."""
    compile_s: float
    """The compiler's time on this host."""

    @property
    def max_bundles(self) -> int:
        """Of the longest step."""
        return int(self.steps.bundles(self.schedule).max())

    def sums(self, per_bundle: np.ndarray) -> np.ndarray:
        """[num_steps] sum of a quantity over the bundles that each step executes."""
        return self.steps.sums(self.schedule, per_bundle)


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
    known = known_steps(call)
    with tempfile.TemporaryDirectory(prefix="static_profile_") as folder:
        seconds = compile_with_dump(call.name, lower_alone(call), Path(folder), flags)
        schedule = read_schedule(Path(folder), _COMPILED_NAME)
    steps, caveat = known, ""
    if isinstance(known, PipelineSteps) and not known.has_own_copies:
        steps, caveat = _matched(call, known, schedule)
    return CallProfile(schedule, steps, caveat, steps.time(schedule), seconds)


def known_steps(call: PallasCall) -> KernelSteps:
    """The steps of a call, before it is compiled, with every region of its body.

    Raises ValueError where they depend on data that is not given.
    """
    if call.num_static_steps == 1:
        raise ValueError(f"{call.name}: a grid of one step leaves no loop in the schedule to read")
    if call.name in OWN_COPIES:
        return OWN_COPIES[call.name](call)
    grid = call.steps()
    return PipelineSteps(grid, find_visits(call, grid))


def _matched(
    call: PallasCall, steps: PipelineSteps, schedule: Schedule
) -> tuple[PipelineSteps, str]:
    """With the regions that the compiler left, and what makes them an upper bound."""
    regions = kernel_regions(schedule)
    matched = match_visits(steps.visits, len(regions))
    if matched is not None:
        assumes = any(visit.is_assumed for visit in matched)
        caveat = "branches that data decides charged to every step" if assumes else ""
        return replace(steps, visits=matched), caveat
    if any(region.kind == "loop" for region in regions):
        raise ValueError(
            f"{call.name}: the compiler left {len(regions)} regions of the body's "
            f"{len(steps.visits)}, loops among them: their trips are not known"
        )
    every = tuple(Visit(f"region {i}", lambda _: np.ones(())) for i in range(len(regions)))
    return replace(steps, visits=every), "every region charged to every step"
