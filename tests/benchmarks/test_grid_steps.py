"""Steps and copies of traced kernels against brute force."""

import functools

import numpy as np
import pytest

from benchmarks import kernel_registry
from benchmarks.routings import group_sizes
from train.compile.static.grid_steps import trace_grid


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
    entry = kernel_registry.find("megablox", "[393216,2048]x[128,2048,768]")
    fn = functools.partial(entry.fn, **entry.static, interpret=False)
    with pytest.raises(ValueError, match="argument whose value is not given"):
        trace_grid(fn, entry.signature, {})
    entry = kernel_registry.find("gmm", "whole tiles")
    fn = functools.partial(entry.fn, **entry.static, interpret=False)
    with pytest.raises(ValueError, match="its copies are not the pipeline's"):
        trace_grid(fn, entry.signature, {2: np.array([256, 0, 0, 0], np.int32)})
    with pytest.raises(ValueError, match="has 0 Pallas calls"):
        trace_grid(functools.partial(double, interpret=False), (((8,), "float32"),), {})
