"""Steps, copies and time of tgmm, which makes its copies itself: no block of it is the pipeline's.

The steps are the kernel's own tables (pallas_ops/tgmm/steps.py). Its copies share one queue that
moves bytes in the order of issue at the full bandwidth of memory; a step begins when its rows and
the buffer of its result are there, and takes a cycle a bundle:

    begin(s) = max(end(s - 1), arrival of rows(s), departure of result(g - 2) where g begins)
    end(s) = begin(s) + bundles(s) / clock

so writes that are spread over steps hide behind them, which max(compute, DMA) a step cannot say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_ops.chips import V6E
from pallas_ops.tgmm import tiling
from pallas_ops.tgmm.steps import group_steps
from pallas_ops.tiling import Tiles
from train.compile.static.schedule import VMATMUL_CYCLES, VMATMUL_FLOPS, Region, Schedule
from train.compile.static.step_time import CLOCK_HZ


@dataclass(frozen=True)
class TgmmSteps:
    """One call that takes K and N whole; arrays are [num_steps], the last step without rows."""

    group: np.ndarray
    """Group of each step."""
    skip: np.ndarray
    """Rows of an earlier group at its front."""
    num_rows: np.ndarray
    """Rows, those to skip included."""
    pieces: np.ndarray
    """Pieces of the result before that it sends."""
    fetched: np.ndarray
    """Bytes of its rows."""
    written: np.ndarray
    """Bytes of the pieces it sends."""
    tile_m: int
    """Rows of a whole step."""
    num_pieces: int
    """Pieces of one result."""
    rounds: bool
    """Whether results leave from buffers of their own."""

    @property
    def opens(self) -> np.ndarray:
        """Whether each step is its group's first."""
        return np.append(True, self.group[1:] != self.group[:-1])

    def figures(self, schedule: Schedule) -> dict[str, Any]:
        """What `benchmarks.kernel_profile` reports of one call, from its schedule."""
        return figures(schedule, self)

    @property
    def blocks(self) -> np.ndarray:
        """Depths of a matrix unit that each step multiplies."""
        return -(-self.num_rows // min(self.tile_m, V6E.mxu_width))


def find_steps(
    group_sizes: np.ndarray, num_rows: int, size_k: int, size_n: int, out_itemsize: int
) -> TgmmSteps:
    """Steps of bf16 operands, with the tiles that the kernel chooses. Raises ValueError if those
    cut K or N."""
    tiles = tiling.choose_tiles(num_rows, size_k, size_n, 2)
    if tiles != Tiles(tiles.tile_m, size_k, size_n):
        raise ValueError(f"tiles {tiles} cut K={size_k} or N={size_n}; profile a smaller shape")
    piece = tiling.piece_rows(size_k)
    num_pieces = -(-size_k // piece)
    tables = group_steps(
        group_sizes,
        num_rows,
        tile_m=tiles.tile_m,
        num_pieces=num_pieces,
        group_offset=0,
        num_groups=len(group_sizes),
    )
    last = int(tables.num_steps[0]) + 1
    group, skip, rows, sent = (
        np.asarray(table)[:last]
        for table in (tables.group, tables.skip, tables.num_rows, tables.num_written)
    )
    opens = np.append(True, group[1:] != group[:-1])
    pieces = np.where(group > 0, sent - np.where(opens, 0, np.append(0, sent[:-1])), 0)
    lanes = sum(_up(size, V6E.num_lanes) for size in (size_k, size_n))
    heights = np.minimum(piece, size_k - piece * np.arange(num_pieces))
    first = np.where(opens, 0, np.append(0, sent[:-1]))
    written = [
        heights[begin : begin + count].sum() for begin, count in zip(first, pieces, strict=True)
    ]
    return TgmmSteps(
        group=group,
        skip=skip,
        num_rows=rows,
        pieces=pieces,
        fetched=_up(rows, V6E.row_group) * lanes * 2,
        written=np.array(written) * _up(size_n, V6E.num_lanes) * out_itemsize,
        tile_m=tiles.tile_m,
        num_pieces=num_pieces,
        rounds=out_itemsize != 4,
    )


def _up(size, multiple: int):
    return -(-size // multiple) * multiple


def step_sums(schedule: Schedule, steps: TgmmSteps, per_bundle: np.ndarray) -> np.ndarray:
    """[num_steps] sum of a quantity over the bundles that each step executes.

    Raises ValueError when the regions of the schedule are not those of the kernel.
    """
    loop = schedule.main_loop
    visits = _visits(steps)
    regions = _regions(loop.children)
    if [name for name, _ in regions] != [name for name, _ in visits]:
        raise ValueError(
            f"the schedule of tgmm has regions {[name for name, _ in regions]}, expected "
            f"{[name for name, _ in visits]}: the kernel has changed, and so must this file"
        )
    sums = np.full(len(steps.group), loop.own(per_bundle))
    for (_, region), (_, times) in zip(regions, visits, strict=True):
        sums += times * region.own(per_bundle)
    return sums


def _regions(children: tuple[Region, ...], depth: int = 0) -> list[tuple[str, Region]]:
    """Regions in program order by kind and depth; a loop that is all one guard is that loop."""
    found = []
    for region in children:
        inner = region.children
        name = f"{depth} {region.kind}"
        if region.kind == "loop" and len(inner) == 1 and inner[0].last == region.last:
            region, inner = inner[0], inner[0].children
        found += [(name, region), *_regions(inner, depth + 1)]
    return found


def _visits(steps: TgmmSteps) -> list[tuple[str, np.ndarray]]:
    """Kind and depth of each region of the kernel's body, and how often each step runs it."""
    here = np.arange(len(steps.group))
    last = here[-1]
    counts = _copies(steps)
    ahead = here + tiling.NUM_BUFFERS - 1
    fetches = ahead < last
    filled = np.where(here == 0, min(tiling.NUM_BUFFERS - 1, last), 0)
    fill = [count[: filled[0]].sum() * (here == 0) for count in counts]
    opens, is_group = steps.opens, steps.group < steps.group[-1]
    block = min(steps.tile_m, V6E.mxu_width)
    visits = [("0 guard", here == 0), ("1 loop", filled), *(("2 loop", count) for count in fill)]
    visits += [("0 guard", fetches)]
    visits += [("1 loop", np.where(fetches, c[np.minimum(ahead, last)], 0)) for c in counts]
    frees = opens & (steps.group > 1)
    visits += [("0 guard", frees), ("1 loop", frees * steps.num_pieces)]
    visits += [("0 guard", steps.group > 0), ("1 loop", steps.pieces)]
    visits += [("0 loop", count) for count in counts]
    visits += [("0 guard", steps.skip > 0), ("0 guard", steps.num_rows % block > 0)]
    visits += [("0 guard", (steps.num_rows == 0) & is_group)]
    visits += [("0 guard", steps.blocks == size) for size in range(1, steps.tile_m // block + 1)]
    if steps.rounds:
        visits += [("0 guard", np.append(opens[1:], False))]
    return [*visits, ("0 loop", np.where(here == last, steps.num_pieces, 0))]


def _copies(steps: TgmmSteps) -> list[np.ndarray]:
    """[num_steps] copies of each size that bring a step's rows."""
    left, found = _up(steps.num_rows, V6E.row_group), []
    for size in tiling.copy_sizes(steps.tile_m):
        found.append(left // size)
        left = left % size
    return found


def queue_seconds(bundles: np.ndarray, steps: TgmmSteps, fixed_bundles: int) -> float:
    """The model above, for bundles [num_steps]."""
    rate, depth = V6E.hbm_bytes_per_s, tiling.NUM_BUFFERS - 1
    num_steps = len(steps.group)
    time = fixed_bundles / CLOCK_HZ
    queue = time
    arrival, departure = np.zeros(num_steps), {}
    for step in range(min(depth, num_steps)):
        queue += steps.fetched[step] / rate
        arrival[step] = queue
    for step in range(num_steps):
        group = int(steps.group[step])
        if step + depth < num_steps:
            queue = max(queue, time) + steps.fetched[step + depth] / rate
            arrival[step + depth] = queue
        if steps.opens[step]:
            time = max(time, departure.get(group - 2, 0.0))
        if steps.pieces[step]:
            queue = max(queue, time) + steps.written[step] / rate
            departure[group - 1] = queue
        time = max(time, arrival[step]) + bundles[step] / CLOCK_HZ
    return float(max(time, queue))


def figures(schedule: Schedule, steps: TgmmSteps) -> dict[str, Any]:
    """What `benchmarks.kernel_profile` reports of one call, from its schedule and steps."""
    bundles = step_sums(schedule, steps, np.ones(schedule.num_bundles))
    vmatmuls = step_sums(schedule, steps, schedule.vmatmuls)
    loop = schedule.main_loop
    seconds = queue_seconds(bundles, steps, schedule.num_bundles - (loop.last - loop.first))
    occupancy = {
        unit: round(
            step_sums(schedule, steps, used).sum() / bundles.sum() / schedule.capacity[unit], 4
        )
        for unit, used in schedule.slots.items()
    }
    dma_bytes = int(steps.fetched.sum() + steps.written.sum())
    dma_seconds = dma_bytes / V6E.hbm_bytes_per_s
    return {
        "tiles": [f"{steps.tile_m} rows", f"{steps.num_pieces} pieces a result"],
        "est_us": round(1e6 * seconds, 3),
        "dma_bytes": dma_bytes,
        "bundles": int(bundles.max()),
        "bundles_mean": round(float(bundles.mean()), 1),
        "issued_flops": float(VMATMUL_FLOPS * vmatmuls.sum()),
        "mxu_floor_bundles": int(vmatmuls.max()) * VMATMUL_CYCLES // 2,
        "mxu_occupancy": occupancy["MXU"],
        "occupancy": occupancy,
        "num_steps": len(bundles),
        "num_live_steps": len(bundles) - 1,
        "compute_us": round(1e6 * bundles.sum() / CLOCK_HZ, 1),
        "dma_us": round(1e6 * dma_seconds, 1),
        "dma_bytes_a_step": round(dma_bytes / len(bundles)),
        "dump_confirms_block_bytes": True,
        "vmem_bytes": schedule.vmem_bytes,
    }
