"""What one call of a kernel does step by step, whoever makes its copies.

The pipeline's copies are read off the call (grid_steps.py), and so is when regions of the body run,
where program ids decide it (visits.py). A kernel that copies by itself has a model of its own: what
its steps copy, what parts of the schedule they run, and what time both give (own_copies.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from train.compile.static.grid_steps import GridSteps
from train.compile.static.schedule import Schedule
from train.compile.static.step_time import (
    StepTime,
    Visit,
    modelled_time,
    region_sums,
    step_sums,
)


@dataclass(frozen=True)
class KernelSteps(ABC):
    """One call of a kernel."""

    grid: GridSteps
    """Its steps, and the bytes that each needs and leaves, whoever copies them."""

    @property
    def num_steps(self) -> int:
        """Grid points."""
        return self.grid.num_steps

    @property
    def dma_bytes(self) -> int:
        """Of every copy."""
        return int(self.grid.fetched.sum() + self.grid.written.sum())

    @property
    def tiles(self) -> tuple[str, ...]:
        """What a step works on, for reports."""
        return tuple("x".join(map(str, block)) for block in self.grid.blocks)

    @property
    def copy_sizes(self) -> frozenset[int] | None:
        """Bytes that one copy may have, None where they vary."""
        return None

    @property
    def useful_rows(self) -> float | None:
        """Share of the multiplied rows that are the step's own, None where it is not counted."""
        return None

    @abstractmethod
    def sums(self, schedule: Schedule, per_bundle: np.ndarray) -> np.ndarray:
        """[num_steps] sum of a quantity over the bundles that each step executes. Raises ValueError
        when the regions of the schedule are not those of the kernel."""

    @abstractmethod
    def regions(self, schedule: Schedule) -> dict[str, float]:
        """Bundles by region of the body, for reports."""

    def bundles(self, schedule: Schedule) -> np.ndarray:
        """[num_steps] bundles that each step executes."""
        return self.sums(schedule, np.ones(schedule.num_bundles))

    def time(self, schedule: Schedule) -> StepTime:
        """Of the call, by step_time.py's model."""
        return modelled_time(self.bundles(schedule), self.grid, schedule.fixed_bundles)


@dataclass(frozen=True)
class PipelineSteps(KernelSteps):
    """A call whose regions are all visited as listed."""

    visits: tuple[Visit, ...]
    """When each region of the body runs."""
    has_own_copies: bool = False
    """Whether the kernel makes copies beside the pipeline's."""

    @property
    def copy_sizes(self) -> frozenset[int] | None:
        return None if self.has_own_copies else frozenset(self.grid.block_bytes)

    def sums(self, schedule: Schedule, per_bundle: np.ndarray) -> np.ndarray:
        return step_sums(schedule, self.grid, self.visits, per_bundle)

    def regions(self, schedule: Schedule) -> dict[str, float]:
        return region_sums(schedule, self.visits, np.ones(schedule.num_bundles))
