"""Kernels in the TPU interpreter: memory that starts as NaN, reads past the end as errors, races.

The plain interpreter starts blocks as zeros and shares no memory between grid steps, so a read of
what was never written looks right in it. This one also raises if a kernel leaves an output block
and comes back to it, which on a TPU would find a block of something else.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ops.tgmm import kernel as tgmm
from pallas_ops.tiling import Tiles
from tests.pallas_ops.simulated import STRICT, without_races

NUM_ROWS, SIZE_K, SIZE_N = 45, 200, 150  # no multiple of a tile anywhere
TILES = Tiles(16, 128, 128)
SIZES = {
    "ragged, a tail": [10, 0, 25, 3],
    "ends on tiles": [16, 0, 29, 0],
    "all empty": [0, 0, 0, 0],
    "one giant": [0, 45, 0, 0],
}
# Every split of the rows in fp32; one compilation serves them all. The rest once each.
SPLITS = [(sizes, "float32", False) for sizes in SIZES]
SPLITS += [("ragged, a tail", "float32", True), ("ragged, a tail", "bfloat16", False)]
TOLERANCE = {"float32": 1e-4, "bfloat16": 2**-8 * 60}  # half a unit of the largest sum


def operands(sizes, *shapes, dtype):
    """Random values rounded to `dtype`; NaN in the rows of 2-D operands that have no group."""
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]
    for array in arrays:
        if array.ndim == 2:
            array[sum(sizes) :] = np.nan
    return arrays


@functools.partial(jax.jit, static_argnums=0, static_argnames=("transpose_rhs", "out_dtype"))
def interpreted(kernel, *arrays, **static):
    return kernel(*arrays, interpret=STRICT, tiles=TILES, **static)


def run(kernel, *arrays, sizes, call=interpreted, **static):
    with without_races():
        (out,) = call(kernel, *arrays, jnp.array(sizes, jnp.int32), **static)
        return np.asarray(out, np.float64)


def runs(sizes):
    return [slice(sum(sizes[:g]), sum(sizes[: g + 1])) for g in range(len(sizes))]


@pytest.mark.parametrize(
    ("split", "dtype"), [(split, dtype) for split, dtype, transposed in SPLITS if not transposed]
)
def test_tgmm(split, dtype):
    sizes = SIZES[split]
    lhs, rhs = operands(sizes, (NUM_ROWS, SIZE_K), (NUM_ROWS, SIZE_N), dtype=dtype)
    out = run(tgmm.tgmm, lhs, rhs, sizes=sizes, out_dtype=dtype)
    wide = [array.astype(np.float64) for array in (lhs, rhs)]
    expected = np.stack([wide[0][rows].T @ wide[1][rows] for rows in runs(sizes)])
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE[dtype])
    for size, matrix in zip(sizes, out, strict=True):
        assert size or not matrix.any()


def test_the_interpreter_sees_an_unwritten_accumulator(monkeypatch):
    # The control of the tests above: without its reset, the accumulator holds what memory held.
    monkeypatch.setattr(jnp, "zeros_like", lambda x: x[...])
    sizes = SIZES["one giant"]
    lhs, rhs = operands(sizes, (NUM_ROWS, SIZE_K), (NUM_ROWS, SIZE_N), dtype="float32")
    call = interpreted.__wrapped__  # not the compiled, intact one
    out = run(tgmm.tgmm, lhs, rhs, sizes=sizes, call=call, out_dtype="float32")
    assert np.isnan(out).any()
