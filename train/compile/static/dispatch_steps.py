"""Steps, copies and time of the kernels that move rows to experts and back.

A step is a block of tokens. Besides what the pipeline brings, its copies are the kernel's own, of
sizes that the routing decides: what each block copies, and how often it runs each region of the
schedule, is read off the tables that the call gets. The time is step_time.py's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from pallas_ops.permute.expand_tables import layout, unpack
from pallas_ops.permute.kernel_parts import PART
from train.compile.static.grid_steps import GridSteps, PallasCall
from train.compile.static.kernel_steps import PipelineSteps
from train.compile.static.step_time import Visit


def find_reduce_steps(call: PallasCall) -> PipelineSteps:
    """Of `reduce_rows`: combine, and permute's backward. Raises ValueError where its tables are not
    known."""
    grid = call.steps(own_copies=True)
    fetch = _known(call, 1)  # [nb, 1, 3 * G]: of every window its granules' first, place and count
    num_groups = fetch.shape[2] // 3
    first, last = _edges(grid)
    visits = (
        _visit("fetch the first block", first),
        _visit("fetch a window of the first block", num_groups),
        _visit("fetch the next block", ~last),
        _visit("fetch a window", num_groups),
        _visit("eight tokens", grid.blocks[-1][0]),
    )
    return _moving(grid, call.signature[-1], fetch[:, 0, 2 * num_groups :].sum(1), 0, visits)


def find_expand_steps(call: PallasCall) -> PipelineSteps:
    """Of `expand_rows`: permute. Raises ValueError where its tables are not known."""
    grid = call.steps(own_copies=True)
    chunks = _chunks(call, seams_at=1, rows=call.scratch[1][0][0])
    first, last = _edges(grid)
    visits = (
        *_loop("select a part of the first chunk", first * chunks.num_parts),
        # Only of blocks with -0 or what is not finite, which activations do not have.
        _visit("split into bytes", 0),
        *_loop("chunk", chunks.count),
        _visit("copy by bytes", 0),
        _visit("copy", 1),
        *_loop("write a window", chunks.windows),
        *_seam_visits(last, chunks),
    )
    fetched = last * chunks.seams_fetched
    written = chunks.complete + last * chunks.seams_written
    return _moving(grid, call.results[0], fetched, written, visits)


def find_combine_backward_steps(call: PallasCall) -> PipelineSteps:
    """Of `combine_backward`. Raises ValueError where its tables are not known."""
    grid = call.steps(own_copies=True)
    chunks = _chunks(call, seams_at=2, rows=call.scratch[2][0][0])
    first, last = _edges(grid)
    visits = (
        _visit("begin", first),
        *_loop("fetch a window of the first chunk", chunks.windows),
        *_loop("chunk", chunks.count),
        _visit("fetch the next chunk", (chunks.count - 1) / chunks.count),
        *_loop("fetch a window", chunks.windows),
        _visit("fetch the next block", ~last / chunks.count),
        _visit("if it has windows", 1),
        _visit("fetch a window of the next block", chunks.windows),
        *_loop("write a window", chunks.windows),
        *_seam_visits(last, chunks),
    )
    fetched = chunks.touched + last * chunks.seams_fetched
    written = chunks.complete + last * chunks.seams_written
    return _moving(grid, call.results[0], fetched, written, visits)


@dataclass(frozen=True)
class _Chunks:
    """What blocks of tokens fill, a chunk of rows at a time; arrays are [nb]."""

    count: np.ndarray
    """Chunks."""
    windows: np.ndarray
    """Windows that a chunk looks at, on the average: those that straddle two are in both."""
    complete: np.ndarray
    """Granules that leave whole."""
    touched: np.ndarray
    """Granules with a row of the block, once a window."""
    num_groups: int
    """Experts."""
    num_parts: int
    """Parts that the rows of a chunk are chosen in."""
    seams_fetched: int
    """Granules that experts share, which are read once all blocks are done ..."""
    seams_written: int
    """... and written."""


def _chunks(call: PallasCall, *, seams_at: int, rows: int) -> _Chunks:
    """From the table of blocks, which is the first operand, and that of seams, before that of
    slots; of chunks of `rows`."""
    line, seams = _known(call, 0)[:, 0], _known(call, seams_at)
    (_, top_k, block), _ = call.signature[seams_at + 1]
    num_groups = seams.shape[1]
    lines = layout(block, top_k, num_groups, rows)
    its, count = unpack(line[:, :num_groups]), line[:, lines.used]
    windows = line[:, lines.ends : lines.used] - line[:, lines.begins : lines.ends]
    in_use = np.arange(lines.num_chunks) < count[:, None]
    is_seam, joined, last = seams[1] >> 4 & 15, seams[1] >> 8 & 1, seams[1] >> 9
    return _Chunks(
        count=count,
        windows=(windows * in_use).sum(1) / count,
        complete=its.count.sum(1),
        touched=(its.count + its.open).sum(1),
        num_groups=num_groups,
        num_parts=rows // PART,
        seams_fetched=int(((is_seam > 0) & (joined == 0)).sum()),
        seams_written=int(((is_seam > 0) & (last == 1)).sum()),
    )


def _seam_visits(last: np.ndarray, chunks: _Chunks) -> tuple[Visit, ...]:
    return (
        _visit("seams", last),
        *(_visit(f"{name} a seam", chunks.num_groups) for name in ("fetch", "wait", "mend")),
        _visit("write a seam", 1),
        _visit("wait for a seam", chunks.num_groups),
    )


def _visit(name: str, times: np.ndarray | float) -> Visit:
    return Visit(name, lambda steps: np.broadcast_to(times, steps.num_steps))


def _loop(name: str, times: np.ndarray | float) -> tuple[Visit, Visit]:
    """A loop, which has no bundles of its own, and its body."""
    return _visit(f"{name}, loop", 1), _visit(name, times)


def _edges(grid: GridSteps) -> tuple[np.ndarray, np.ndarray]:
    """Whether a step is the first, and the last."""
    step = np.arange(grid.num_steps)
    return step == 0, step == grid.num_steps - 1


def _known(call: PallasCall, operand: int) -> np.ndarray:
    value = call.operands[operand]
    if value is None:
        raise ValueError(
            f"{call.name}: its tables depend on an argument whose value is not given; add it to "
            "`known`"
        )
    return np.asarray(value)


def _moving(
    grid: GridSteps,
    rows: tuple[tuple[int, ...], str],
    fetched: np.ndarray,
    written: np.ndarray | int,
    visits: tuple[Visit, ...],
) -> PipelineSteps:
    """With granules of `rows`, an array of them, that the kernel itself copies a step."""
    (_, *granule), dtype = rows
    nbytes = math.prod(granule) * np.dtype(dtype).itemsize
    moved = replace(
        grid, fetched=grid.fetched + nbytes * fetched, written=grid.written + nbytes * written
    )
    return PipelineSteps(moved, visits, has_own_copies=True)
