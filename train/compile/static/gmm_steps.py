"""Steps, copies and time of gmm, whose matrices the kernel copies itself.

The steps are the kernel's own tables (pallas_ops/gmm/visits.py). Blocks of rows are the pipeline's,
one step ahead (step_time.py). A matrix is sent for at the first visit of the one before and waited
for at its own: in between it has the bandwidth that blocks leave, and what then is missing is time
lost. The very first is waited for at once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from pallas_ops.chips import V6E
from pallas_ops.gmm.visits import Visits
from pallas_ops.tiling import row_buckets
from train.compile.static.grid_steps import PallasCall
from train.compile.static.kernel_steps import KernelSteps
from train.compile.static.schedule import Region, Schedule
from train.compile.static.step_time import CLOCK_HZ, StepTime


@dataclass(frozen=True)
class GmmSteps(KernelSteps):
    """One call; the grid's bytes are those of row blocks."""

    tile_m: int
    """Rows of a block."""
    branch: np.ndarray
    """[num_steps] which part of the body a step runs: 0 fills rows of no group, i > 0 multiplies as
    many rows as `row_buckets` has at i - 1."""
    opens: np.ndarray
    """[num_steps] whether a step waits for a matrix."""
    matrix_bytes: int
    """Of the columns of one matrix that a step uses."""
    num_own_rows: int
    """Rows of all groups, as often as they are multiplied."""

    @property
    def computed_rows(self) -> int:
        """Rows multiplied, own or not."""
        return int(np.array([0, *row_buckets(self.tile_m)])[self.branch].sum())

    @property
    def useful_rows(self) -> float:
        return self.num_own_rows / max(1, self.computed_rows)

    @property
    def dma_bytes(self) -> int:
        return super().dma_bytes + self.matrix_bytes * int(self.opens.sum())

    def sums(self, schedule: Schedule, per_bundle: np.ndarray) -> np.ndarray:
        num_branches = 1 + len(row_buckets(self.tile_m))
        branch = branch_sums(schedule, per_bundle, num_branches)
        return branch[self.branch] + self.opens * sending_sum(schedule, per_bundle)

    def regions(self, schedule: Schedule) -> dict[str, float]:
        names = ("rest", *(f"{rows} rows" for rows in row_buckets(self.tile_m)))
        per_bundle = np.ones(schedule.num_bundles)
        parts = branch_sums(schedule, per_bundle, len(names)).tolist()
        return dict(zip(names, parts, strict=True)) | {
            "a matrix sent for": sending_sum(schedule, per_bundle)
        }

    def time(self, schedule: Schedule) -> StepTime:
        """By the model above."""
        compute = self.bundles(schedule) / CLOCK_HZ
        fixed = schedule.fixed_bundles / CLOCK_HZ
        seconds, num_dma_bound = self.seconds(compute)
        return StepTime(
            total=fixed + seconds,
            compute=float(fixed + compute.sum()),
            dma=self.dma_bytes / V6E.hbm_bytes_per_s,
            num_dma_bound=num_dma_bound,
        )

    def seconds(self, compute: np.ndarray) -> tuple[float, int]:
        """The model above, for seconds of compute [num_steps]; and how many steps wait for
        blocks."""
        rate, fetched, written = V6E.hbm_bytes_per_s, self.grid.fetched, self.grid.written
        in_flight = np.zeros(len(compute))
        in_flight[:-1] += fetched[1:]
        in_flight[1:] += written[:-1]
        step = np.maximum(compute, in_flight / rate)
        idle = np.append(0, np.cumsum(step - in_flight / rate))
        openings = np.flatnonzero(self.opens)
        lost = self.matrix_bytes / rate if len(openings) else 0.0
        for begin, end in itertools.pairwise(openings):
            lost += max(0.0, self.matrix_bytes / rate - (idle[end] - idle[begin]))
        edges = (fetched[0] + written[-1]) / rate
        return float(edges + step.sum() + lost), int((in_flight / rate > compute).sum())


def branch_sums(schedule: Schedule, per_bundle: np.ndarray, num_branches: int) -> np.ndarray:
    """[num_branches] sum of a quantity over the bundles of a step that runs one innermost branch of
    the body, everything around it included but the loop that sends for matrices: the first branch,
    then those with products by their rows, of which a whole tile's comes first in the body. Any
    other waits for a matrix; every step is charged with it.

    Raises ValueError when the compiler left another number of branches.
    """
    loop = schedule.main_loop
    body = _body(schedule)

    def total(region: Region) -> float:
        return float(per_bundle[region.first : region.last].sum())

    def multiplies(region: Region) -> bool:
        return bool(schedule.vmatmuls[region.first : region.last].any())

    def leaves(region: Region, around: float) -> list[float]:
        inner = [child for child in region.children if multiplies(child)]
        around += total(region) - sum(map(total, inner))
        return [each for child in inner for each in leaves(child, around)] or [around]

    rest = total(body.children[0]) if body.children else 0.0
    sending = sending_sum(schedule, per_bundle)
    whole, *parts = leaves(body, total(loop) - total(body) - rest - sending)
    outside = total(loop) - sending
    outside -= sum(total(child) for child in body.children if multiplies(child))
    found = [outside, *parts, whole]
    if len(found) != num_branches:
        raise ValueError(
            f"the schedule of gmm has {len(found) - 1} products, expected {num_branches - 1}: one "
            "a row count of `row_buckets`"
        )
    return np.array(found)


def sending_sum(schedule: Schedule, per_bundle: np.ndarray) -> float:
    """Sum of a quantity over one turn of the loop that sends for matrices; a matrix is a turn."""
    loops = [child for child in _body(schedule).children if child.kind == "loop"]
    return float(sum(per_bundle[loop.first : loop.last].sum() for loop in loops))


def _body(schedule: Schedule) -> Region:
    return max(schedule.main_loop.children, key=lambda guard: guard.last - guard.first)


def find_steps(call: PallasCall) -> GmmSteps:
    """Steps of one call. Raises ValueError where its tables are not known."""
    grid = call.steps(own_copies=True)
    visits, column = Visits(*grid.scalars), grid.ids[1]
    tile_m = grid.blocks[-1][0]
    rank, first, end = (table[column] for table in (visits.rank, visits.first, visits.end))
    is_group = rank >= 0
    start = first // V6E.row_group * V6E.row_group
    size = np.searchsorted(row_buckets(tile_m), end - start)
    # Two matrices lie in VMEM, of which one is in use.
    (_, *matrix), itemsize = call.scratch[0]
    return GmmSteps(
        grid=grid,
        tile_m=tile_m,
        branch=np.where(is_group, 1 + size, 0),
        opens=is_group
        & np.append(True, (rank[1:] != rank[:-1]) | (grid.ids[0][1:] != grid.ids[0][:-1])),
        matrix_bytes=matrix[0] * matrix[1] * itemsize,
        num_own_rows=int((end - first)[is_group].sum()),
    )
