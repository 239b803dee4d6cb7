"""Steps, copies and time of tgmm, which makes its copies itself: no block of it is the pipeline's.

The steps are the kernel's own tables (pallas_ops/tgmm/steps.py). Its copies share one queue that
moves bytes in the order of issue at the full bandwidth of memory; a step begins when its rows and
the buffer of its result are there, and takes a cycle a bundle:

    begin(s) = max(end(s - 1), arrival of rows(s), departure of result(g - 2) where g begins)
    end(s) = begin(s) + bundles(s) / clock

so writes that are spread over steps hide behind them, which max(compute, DMA) a step cannot say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pallas_ops.chips import V6E
from pallas_ops.tgmm import tiling
from pallas_ops.tgmm.steps import Steps
from train.compile.static.grid_steps import PallasCall
from train.compile.static.kernel_steps import KernelSteps
from train.compile.static.schedule import Region, Schedule
from train.compile.static.step_time import CLOCK_HZ, EVERY_STEP, StepTime


@dataclass(frozen=True)
class TgmmSteps(KernelSteps):
    """One call that takes K and N whole; arrays are [num_steps], the last step without rows.

    The grid's bytes are those of a step's rows, and of the pieces that it sends.
    """

    group: np.ndarray
    """Group of each step."""
    skip: np.ndarray
    """Rows of an earlier group at its front."""
    num_rows: np.ndarray
    """Rows, those to skip included."""
    pieces: np.ndarray
    """Pieces of the result before that it sends."""
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

    @property
    def blocks(self) -> np.ndarray:
        """Depths of a matrix unit that each step multiplies."""
        return -(-self.num_rows // min(self.tile_m, V6E.mxu_width))

    @property
    def tiles(self) -> tuple[str, ...]:
        return f"{self.tile_m} rows", f"{self.num_pieces} pieces a result"

    def sums(self, schedule: Schedule, per_bundle: np.ndarray) -> np.ndarray:
        loop = schedule.main_loop
        visits = _visits(self)
        regions = _regions(loop.children)
        if [name for name, _ in regions] != [name for name, _ in visits]:
            raise ValueError(
                f"the schedule of tgmm has regions {[name for name, _ in regions]}, expected "
                f"{[name for name, _ in visits]}: the kernel has changed, and so must this file"
            )
        sums = np.full(self.num_steps, loop.own(per_bundle))
        for (_, region), (_, times) in zip(regions, visits, strict=True):
            sums += times * region.own(per_bundle)
        return sums

    def regions(self, schedule: Schedule) -> dict[str, float]:
        return {EVERY_STEP: schedule.main_loop.own(np.ones(schedule.num_bundles))}

    def time(self, schedule: Schedule) -> StepTime:
        """By the model above."""
        bundles, fixed = self.bundles(schedule), schedule.fixed_bundles
        total, num_dma_bound = self.seconds(bundles, fixed)
        return StepTime(
            total=total,
            compute=float(fixed + bundles.sum()) / CLOCK_HZ,
            dma=self.dma_bytes / V6E.hbm_bytes_per_s,
            num_dma_bound=num_dma_bound,
        )

    def seconds(self, bundles: np.ndarray, fixed_bundles: int) -> tuple[float, int]:
        """The model above, for bundles [num_steps]; and how many steps wait for copies."""
        rate, depth = V6E.hbm_bytes_per_s, tiling.NUM_BUFFERS - 1
        fetched, written = self.grid.fetched, self.grid.written
        time = fixed_bundles / CLOCK_HZ
        queue, num_waiting = time, 0
        arrival, departure = np.zeros(self.num_steps), {}
        for step in range(min(depth, self.num_steps)):
            queue += fetched[step] / rate
            arrival[step] = queue
        for step in range(self.num_steps):
            group = int(self.group[step])
            if step + depth < self.num_steps:
                queue = max(queue, time) + fetched[step + depth] / rate
                arrival[step + depth] = queue
            begun = time
            if self.opens[step]:
                time = max(time, departure.get(group - 2, 0.0))
            if self.pieces[step]:
                queue = max(queue, time) + written[step] / rate
                departure[group - 1] = queue
            time = max(time, arrival[step])
            num_waiting += int(time > begun)
            time += bundles[step] / CLOCK_HZ
        return float(max(time, queue)), num_waiting


def find_steps(call: PallasCall) -> TgmmSteps:
    """Steps of one call. Raises ValueError where its tables are not known, and where its tiles cut
    K or N."""
    grid = call.steps(own_copies=True)
    if grid.grid[:2] != (1, 1):
        raise ValueError(
            f"tgmm: {grid.grid[0]} x {grid.grid[1]} tiles cut K or N; profile a smaller shape"
        )
    (ring, itemsize), (rhs_ring, _), *_, (result, out_itemsize) = call.scratch
    _, tile_m, tile_k = ring
    size_k, size_n = result[1], rhs_ring[2]
    piece = tiling.piece_rows(size_k)
    num_pieces = -(-size_k // piece)
    tables = Steps(*grid.scalars)
    last = grid.num_steps
    group, skip, rows, sent = (
        table[:last] for table in (tables.group, tables.skip, tables.num_rows, tables.num_written)
    )
    opens = np.append(True, group[1:] != group[:-1])
    first = np.where(opens, 0, np.append(0, sent[:-1]))
    pieces = np.where(group > 0, sent - first, 0)
    heights = np.minimum(piece, size_k - piece * np.arange(num_pieces))
    written = [
        heights[begin : begin + count].sum() for begin, count in zip(first, pieces, strict=True)
    ]
    return TgmmSteps(
        grid=replace(
            grid,
            fetched=_up(rows, V6E.row_group) * (tile_k + size_n) * itemsize,
            written=np.array(written) * size_n * out_itemsize,
        ),
        group=group,
        skip=skip,
        num_rows=rows,
        pieces=pieces,
        tile_m=tile_m,
        num_pieces=num_pieces,
        rounds=out_itemsize != 4,
    )


def _up(size, multiple: int):
    return -(-size // multiple) * multiple


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
    here = np.arange(steps.num_steps)
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
