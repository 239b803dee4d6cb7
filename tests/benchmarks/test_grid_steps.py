"""Steps and copies of traced kernels against brute force."""

import functools
import math

import numpy as np
import pytest

from benchmarks import kernel_registry
from benchmarks.routings import group_sizes
from pallas_ops.gmm.kernel import gmm
from pallas_ops.tiling import Tiles
from train.compile.static.grid_steps import trace_grid

SIZES = ((16, 0, 40, 8), (5, 20, 3, 36), (0, 0, 64, 0), (16, 16, 16, 0), (1, 2, 3, 4))
ROWS, K, N, TILE = 70, 256, 130, 16


def pairs(sizes, visit_empty):
    """(group, tile) of each step, from what a step is: a tile and a group that share a row."""
    found, start = [], 0
    for group, size in enumerate(sizes):
        tiles = sorted({row // TILE for row in range(start, start + size)})
        found += [(group, tile) for tile in tiles]
        if not size and visit_empty:
            found.append((group, min(start // TILE, (ROWS - 1) // TILE)))
        start += size
    return found


def tile_bytes(tile, columns, itemsize):
    rows = min(TILE, ROWS - tile * TILE)
    return math.ceil(rows / 8) * 8 * math.ceil(columns / 128) * 128 * itemsize


def changes(keys):
    return [key for i, key in enumerate(keys) if not i or key != keys[i - 1]]


@pytest.mark.parametrize("sizes", SIZES)
def test_gmm_steps_and_bytes_equal_brute_force(sizes):
    entry = kernel_registry.find("gmm", "whole tiles")
    signature = (((ROWS, K), "bfloat16"), ((4, K, N), "bfloat16"), ((4,), "int32"))
    fn = functools.partial(gmm, transpose_rhs=False, interpret=False, tiles=Tiles(TILE, 128, N))
    steps = trace_grid(fn, signature, {2: np.array(sizes, np.int32)})
    tail = ROWS - sum(sizes)  # a group of its own that stores zeros
    live = pairs((*sizes, tail), visit_empty=False)
    points = [(step, k) for step in range(ROWS // TILE + 1 + 4) for k in range(2)]
    assert steps.grid == (1, len(points) // 2, 2)
    at = [live[min(step, len(live) - 1)] for step, _ in points]
    fetched = sum(
        tile_bytes(t, 128, 2)
        for t, _ in changes([(t, k) for (_, t), (_, k) in zip(at, points, strict=True)])
    )
    weights = changes([(min(g, 3), k) for (g, _), (_, k) in zip(at, points, strict=True)])
    fetched += len(weights) * 128 * 256 * 2  # 130 columns are two tiles of lanes
    assert steps.fetched.sum() == fetched
    assert steps.written.sum() == sum(tile_bytes(t, N, 2) for t in changes([t for _, t in at]))
    entry_visits = {visit.name: visit.times for visit in entry.visits}
    runs = [step < len(live) for step, _ in points]
    zero = [r and k == 0 for r, (_, k) in zip(runs, points, strict=True)]
    compute = [r and g < 4 for r, (g, _) in zip(runs, at, strict=True)]
    store = [r and k == 1 for r, (_, k) in zip(runs, points, strict=True)]
    got = {name: list(times(steps)) for name, times in entry_visits.items() if name != "accumulate"}
    assert got == {"zero": zero, "store": store}
    assert list(entry_visits["accumulate"](steps)) == compute


def test_dynamic_grid_counts_live_steps():
    entry = kernel_registry.find("megablox", "[393216,2048]x[128,2048,768]")
    fn = functools.partial(entry.fn, **entry.static, interpret=False)
    steps = trace_grid(fn, entry.signature, {2: group_sizes("worst", 393_216, 128)})
    assert steps.grid == (1, 393_216 // 512 + 127, 1)
    assert steps.block_bytes == (512 * 2048 * 2, 2048 * 768 * 2, 512 * 768 * 2)
    assert steps.written.sum() == 393_216 * 768 * 2  # a tile of two groups is written once


def double(x, *, interpret):
    return (2 * x,)


def test_grids_that_cannot_be_known_are_refused():
    signature = (((ROWS, K), "bfloat16"), ((4, K, N), "bfloat16"), ((4,), "int32"))
    with pytest.raises(ValueError, match="argument whose value is not given"):
        trace_grid(functools.partial(gmm, transpose_rhs=False, interpret=False), signature, {})
    with pytest.raises(ValueError, match="has 0 Pallas calls"):
        trace_grid(functools.partial(double, interpret=False), (((8,), "float32"),), {})
