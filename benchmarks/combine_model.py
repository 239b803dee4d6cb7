"""The time of the dispatch kernels from their schedules, for a given routing.

Their copies are their own, of sizes that the routing decides, so grid_steps.py does not see them:
what each block copies is counted here from the window tables, and how often it runs each region of
the schedule. The time is step_time.py's, a block of tokens being a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.combine_programs import SHAPE
from pallas_ops.permute.kernel_parts import PART, SLOTS, chunk_rows
from pallas_ops.routing.blocks import BLOCK, GRANULE
from pallas_ops.routing.reference_windows import routing_windows
from train.compile.static.grid_steps import GridSteps
from train.compile.static.step_time import Visit

CHUNK = chunk_rows(BLOCK, SHAPE.top_k, SHAPE.num_experts, 2 * SHAPE.width, 2 * SLOTS)
"""Rows that permute and combine's backward build at a time."""
ROUTINGS = {"balanced": 0.0, "skewed": 1.0}
"""Exponent of a Zipf law over experts, from which each token draws distinct ones."""


@dataclass(frozen=True)
class Traffic:
    """What blocks of tokens move, [nb] each."""

    slots: np.ndarray
    """Rows that belong to the block."""
    ring_rows: np.ndarray
    """Rows that the ring of buffers fetches."""
    window_rows: np.ndarray
    """Rows of all granules that the block's windows touch."""
    windows: np.ndarray
    """Windows that are not empty."""

    @property
    def chunks(self) -> np.ndarray:
        """Chunks of rows that permute and combine's backward build."""
        return -(-self.window_rows // CHUNK)

    @property
    def chunk_windows(self) -> np.ndarray:
        """Windows a chunk, those that straddle two counted in both."""
        return (self.windows + self.chunks - 1) / self.chunks


def traffic_of(routing: str) -> Traffic:
    """Of the production shape with seed 0. Raises KeyError for an unknown routing."""
    noise = np.random.default_rng(0).gumbel(size=(SHAPE.num_tokens, SHAPE.num_experts))
    noise -= ROUTINGS[routing] * np.log1p(np.arange(SHAPE.num_experts))
    ids = np.argpartition(noise, -SHAPE.top_k, axis=1)[:, -SHAPE.top_k :].astype(np.int32)
    bounds, _, _, _, fetch = routing_windows(torch.from_numpy(ids), SHAPE.num_experts, block=BLOCK)
    bounds, fetch = bounds.numpy(), fetch.numpy()
    begin, end = bounds[:-1], bounds[1:]
    used = end > begin
    granules = (-(-end // GRANULE) - begin // GRANULE) * used
    return Traffic(
        slots=(end - begin).sum(1),
        ring_rows=GRANULE * fetch[:, 2].sum(1),
        window_rows=GRANULE * granules.sum(1),
        windows=used.sum(1),
    )


def steps_of(rows_in: np.ndarray, rows_out: np.ndarray) -> GridSteps:
    """Blocks as grid steps, from the rows that each fetches and writes."""
    num = len(rows_in)
    row_bytes = 2 * SHAPE.width
    return GridSteps(
        grid=(num,),
        ids=(np.arange(num),),
        scalars=(),
        blocks=(),
        block_bytes=(),
        fetched=rows_in * row_bytes,
        written=rows_out * row_bytes,
    )


@dataclass(frozen=True)
class KernelModel:
    """How a kernel runs the regions of its schedule, and what it copies."""

    copies: Callable[[Traffic], tuple[np.ndarray, np.ndarray]]
    """Rows fetched and written, [nb] each."""
    visits: Callable[[Traffic], tuple[Visit, ...]]
    """One a region of the kernel's body."""


def _visit(name: str, times) -> Visit:
    return Visit(name, lambda steps: np.broadcast_to(times, steps.num_steps))


def _first(traffic: Traffic) -> np.ndarray:
    return np.arange(len(traffic.slots)) == 0


def _last(traffic: Traffic) -> np.ndarray:
    return _first(traffic)[::-1]


def _reduce_visits(traffic: Traffic) -> tuple[Visit, ...]:
    return (
        _visit("fetch the first block", _first(traffic)),
        _visit("fetch a window of the first block", SHAPE.num_experts),
        _visit("fetch the next block", ~_last(traffic)),
        _visit("fetch a window", SHAPE.num_experts),
        _visit("eight tokens", BLOCK // GRANULE),
    )


def _seam_visits(traffic: Traffic) -> tuple[Visit, ...]:
    each = ("fetch", "wait", "mend")
    loops = [_visit(f"{name} a seam", SHAPE.num_experts) for name in each]
    return (
        _visit("seams", _last(traffic)),
        *loops,
        _visit("write a seam", 1),
        _visit("wait for a seam", SHAPE.num_experts),
    )


def _loop(name: str, times) -> tuple[Visit, Visit]:
    """A loop, which has no bundles of its own, and its body."""
    return _visit(f"{name}, loop", 1), _visit(name, times)


def _expand_visits(traffic: Traffic) -> tuple[Visit, ...]:
    return (
        *_loop("select a part of the first chunk", _first(traffic) * (CHUNK // PART)),
        *_loop("chunk", traffic.chunks),
        *_loop("write a window", traffic.chunk_windows),
        *_seam_visits(traffic),
    )


def _backward_visits(traffic: Traffic) -> tuple[Visit, ...]:
    inner = traffic.chunks - 1
    return (
        _visit("begin", _first(traffic)),
        *_loop("fetch a window of the first chunk", traffic.chunk_windows),
        *_loop("chunk", traffic.chunks),
        _visit("fetch the next chunk", inner / traffic.chunks),
        *_loop("fetch a window", traffic.chunk_windows),
        _visit("fetch the next block", ~_last(traffic) / traffic.chunks),
        _visit("if it has windows", 1),
        _visit("fetch a window of the next block", traffic.chunk_windows),
        *_loop("write a window", traffic.chunk_windows),
        *_seam_visits(traffic),
    )


def _tokens(traffic: Traffic) -> np.ndarray:
    return np.full(len(traffic.slots), BLOCK)


_REDUCE = KernelModel(lambda t: (t.ring_rows, _tokens(t)), _reduce_visits)
MODELS = {
    "combine": _REDUCE,
    "permute backward": _REDUCE,
    "permute": KernelModel(lambda t: (_tokens(t), t.slots), _expand_visits),
    "combine backward": KernelModel(
        lambda t: (_tokens(t) + t.window_rows, t.slots), _backward_visits
    ),
}
"""By the name of the program."""
