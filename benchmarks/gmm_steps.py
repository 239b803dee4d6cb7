"""Steps, copies and time of gmm, whose matrices the kernel copies itself.

The steps are the kernel's own tables (pallas_ops/gmm/visits.py). Blocks of rows are the pipeline's,
one step ahead (train/compile/static/step_time.py). A matrix is sent for at the first visit of the
one before and waited for at its own: in between it has the bandwidth that blocks leave, and what
then is missing is time lost. The very first is waited for at once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_ops.chips import V6E
from pallas_ops.gmm.visits import Visits, make_visits
from pallas_ops.tiling import Tiles, choose_gmm_tiles, row_buckets
from train.compile.static.schedule import VMATMUL_CYCLES, VMATMUL_FLOPS, Region, Schedule
from train.compile.static.step_time import CLOCK_HZ


@dataclass(frozen=True)
class GmmSteps:
    """One call that takes N whole; arrays are [num_steps]."""

    tiles: Tiles
    """Those the kernel chooses."""
    branch: np.ndarray
    """Which part of the body a step runs: 0 fills rows of no group, i > 0 multiplies as many rows
    as `row_buckets` has at i - 1."""
    opens: np.ndarray
    """Whether a step waits for a matrix."""
    fetched: np.ndarray
    """Bytes of blocks that must arrive before the step."""
    written: np.ndarray
    """Bytes of blocks that leave after the step."""
    matrix_bytes: int
    """Bytes of one matrix."""
    num_own_rows: int
    """Rows of all groups."""

    @property
    def computed_rows(self) -> int:
        """Rows multiplied, own or not."""
        return int(np.array([0, *row_buckets(self.tiles.tile_m)])[self.branch].sum())

    @property
    def dma_bytes(self) -> int:
        """Bytes of every copy."""
        return int(self.fetched.sum() + self.written.sum() + self.matrix_bytes * self.opens.sum())

    def figures(self, schedule: Schedule) -> dict[str, Any]:
        """What `benchmarks.kernel_profile` reports of one call, from its schedule."""
        bundles = self.sums(schedule, np.ones(schedule.num_bundles))
        vmatmuls = self.sums(schedule, schedule.vmatmuls)
        loop = schedule.main_loop
        compute = bundles / CLOCK_HZ
        fixed = (schedule.num_bundles - (loop.last - loop.first)) / CLOCK_HZ
        seconds, num_dma_bound = self.seconds(compute)
        occupancy = {
            unit: round(
                self.sums(schedule, used).sum() / bundles.sum() / schedule.capacity[unit], 4
            )
            for unit, used in schedule.slots.items()
        }
        sizes = ("rest", *(f"{rows} rows" for rows in row_buckets(self.tiles.tile_m)))
        parts = branch_sums(schedule, np.ones(schedule.num_bundles), len(sizes))
        tiles = self.tiles
        return {
            "tiles": [f"{tiles.tile_m}x{tiles.tile_k}", f"{tiles.tile_k}x{tiles.tile_n}"],
            "est_us": round(1e6 * (fixed + seconds), 3),
            "dma_bytes": self.dma_bytes,
            "bundles": int(bundles.max()),
            "bundles_mean": round(float(bundles.mean()), 1),
            "bundles_by_region": {name: int(each) for name, each in zip(sizes, parts, strict=True)},
            "useful_rows": round(self.num_own_rows / max(1, self.computed_rows), 4),
            "issued_flops": float(VMATMUL_FLOPS * vmatmuls.sum()),
            "mxu_floor_bundles": int(vmatmuls.max()) * VMATMUL_CYCLES // 2,
            "mxu_occupancy": occupancy["MXU"],
            "occupancy": occupancy,
            "num_steps": len(bundles),
            "num_live_steps": len(bundles),
            "num_dma_bound_steps": num_dma_bound,
            "compute_us": round(1e6 * (fixed + compute.sum()), 1),
            "dma_us": round(1e6 * self.dma_bytes / V6E.hbm_bytes_per_s, 1),
            "dma_bytes_a_step": round(self.dma_bytes / len(bundles)),
            "dump_confirms_block_bytes": True,
            "vmem_bytes": schedule.vmem_bytes,
        }

    def sums(self, schedule: Schedule, per_bundle: np.ndarray) -> np.ndarray:
        """[num_steps] sum of a quantity over the bundles that each step executes."""
        num_branches = 1 + len(row_buckets(self.tiles.tile_m))
        return branch_sums(schedule, per_bundle, num_branches)[self.branch]

    def seconds(self, compute: np.ndarray) -> tuple[float, int]:
        """The model above, for seconds of compute [num_steps]; and how many steps wait for
        blocks."""
        rate = V6E.hbm_bytes_per_s
        in_flight = np.zeros(len(compute))
        in_flight[:-1] += self.fetched[1:]
        in_flight[1:] += self.written[:-1]
        step = np.maximum(compute, in_flight / rate)
        idle = np.append(0, np.cumsum(step - in_flight / rate))
        openings = np.flatnonzero(self.opens)
        lost = self.matrix_bytes / rate if len(openings) else 0.0
        for begin, end in itertools.pairwise(openings):
            lost += max(0.0, self.matrix_bytes / rate - (idle[end] - idle[begin]))
        edges = (self.fetched[0] + self.written[-1]) / rate
        return float(edges + step.sum() + lost), int((in_flight / rate > compute).sum())


def branch_sums(schedule: Schedule, per_bundle: np.ndarray, num_branches: int) -> np.ndarray:
    """[num_branches] sum of a quantity over the bundles of a step that runs one innermost branch of
    the body, everything around it included: the first branch, then those with products. Others
    start or await copies; every step is charged with them.

    Raises ValueError when the compiler left another number of branches.
    """
    loop = schedule.main_loop
    body = max(loop.children, key=lambda guard: guard.last - guard.first)

    def total(region: Region) -> float:
        return float(per_bundle[region.first : region.last].sum())

    def multiplies(region: Region) -> bool:
        return bool(schedule.vmatmuls[region.first : region.last].any())

    def leaves(region: Region, around: float) -> list[float]:
        inner = [child for child in region.children if multiplies(child)]
        around += total(region) - sum(map(total, inner))
        return [each for child in inner for each in leaves(child, around)] or [around]

    rest = total(body.children[0]) if body.children else 0.0
    products = leaves(body, total(loop) - total(body) - rest)
    outside = total(loop) - sum(total(child) for child in body.children if multiplies(child))
    found = [outside, *products]
    if len(found) != num_branches:
        raise ValueError(
            f"the schedule of gmm has {len(found) - 1} products, expected {num_branches - 1}: one "
            "a row count of `row_buckets`"
        )
    return np.array(found)


def find_steps(
    group_sizes: np.ndarray, num_rows: int, size_k: int, size_n: int, transpose_rhs: bool
) -> GmmSteps:
    """Steps of bf16 operands, with the tiles that the kernel chooses. Raises ValueError if those
    cut N."""
    tiles = choose_gmm_tiles(num_rows, size_k, size_n, len(group_sizes), 2)
    if tiles.tile_n < size_n:
        raise ValueError(f"tiles {tiles} cut N={size_n}; profile a smaller shape")
    tables, num_visits = make_visits(
        np.asarray(group_sizes, np.int32),
        num_rows,
        tiles.tile_m,
        group_offset=0,
        num_groups=len(group_sizes),
        rest=("zero", "zero"),
    )
    visits = Visits(*(np.asarray(table)[: int(num_visits)] for table in tables))
    is_group = visits.rank >= 0
    start = visits.first // V6E.row_group * V6E.row_group
    size = np.searchsorted(row_buckets(tiles.tile_m), visits.end - start)
    height = np.minimum(num_rows - np.arange(0, num_rows, tiles.tile_m), tiles.tile_m)

    def moved(tile: np.ndarray, columns: int) -> np.ndarray:
        return height[tile] * _in_lanes(columns) * 2

    reads = np.append(True, visits.lhs_tile[1:] != visits.lhs_tile[:-1])
    writes = np.append(visits.tile[1:] != visits.tile[:-1], True)
    rows, columns = (size_n, size_k) if transpose_rhs else (size_k, size_n)
    return GmmSteps(
        tiles=tiles,
        branch=np.where(is_group, 1 + size, 0),
        opens=is_group & np.append(True, visits.rank[1:] != visits.rank[:-1]),
        fetched=np.where(reads, moved(visits.lhs_tile, size_k), 0),
        written=np.where(writes, moved(visits.tile, size_n), 0),
        matrix_bytes=rows * _in_lanes(columns) * 2,
        num_own_rows=int(np.sum(group_sizes)),
    )


def _in_lanes(columns: int) -> int:
    return -(-columns // V6E.num_lanes) * V6E.num_lanes
