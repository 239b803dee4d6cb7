"""The kernels that fill rows from tokens, permute and combine's backward, against a gather.

Both in the TPU interpreter, where memory starts as NaN and races are seen, and in the plain one,
which the ops use on a CPU. Rows are compared to the bit.
"""

import functools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ops.combine.kernel_backward import combine_backward_windows
from pallas_ops.permute.expand_tables import (
    MAX_BUFFER_ROWS,
    Window,
    block_table,
    layout,
    pack,
    unpack,
)
from pallas_ops.permute.kernel_expand import expand_rows
from pallas_ops.permute.kernel_parts import PART, chunk_rows, stage_granules
from pallas_ops.routing.blocks import BLOCK, GRANULE, buffer_rows
from pallas_ops.routing.windows import routing_windows
from tests.pallas_ops.simulated import STRICT, without_races

BF16 = jnp.dtype(jnp.bfloat16)


def zipf_ids(num_tokens, top_k, num_experts, skew=0.0):
    """Distinct experts a token, drawn by a Zipf law."""
    draws = np.random.default_rng(0).gumbel(size=(num_tokens, num_experts))
    draws -= skew * np.log1p(np.arange(num_experts))
    return np.argpartition(draws, -top_k, axis=1)[:, -top_k:].astype(np.int32)


@functools.partial(jax.jit, static_argnames=("num_experts", "block", "chunk", "simulated"))
def run_both(x, dout, rows, weights, ids, *, num_experts, block, chunk, simulated):
    windows = routing_windows(ids, num_experts=num_experts, block=block)
    options = {"interpret": STRICT if simulated else True, "chunk": chunk}
    own = windows[:3]
    return (
        expand_rows(x, *own, **options),
        *combine_backward_windows(dout, rows, weights, *own, **options),
    )


def operands(ids, width, weights_dtype):
    """x, dout, rows and weights; the last token of x holds what products with 0 and 1 change."""
    (num_tokens, _), draw = ids.shape, np.random.default_rng(1)
    x, dout = draw.standard_normal((2, num_tokens, width)).astype(BF16)
    x[-1, :4] = -0.0, np.inf, -np.inf, np.nan
    rows = draw.standard_normal((ids.size, width)).astype(BF16)
    return x, dout, rows, draw.random(ids.shape).astype(jnp.dtype(weights_dtype))


def check(ids, num_experts, width, block, *, chunk=None, weights_dtype="float32", simulated=False):
    top_k = ids.shape[1]
    x, dout, rows, weights = operands(ids, width, weights_dtype)
    options = {"num_experts": num_experts, "block": block, "chunk": chunk, "simulated": simulated}
    with without_races() if simulated else nullcontext():
        got = run_both(x, dout, rows, weights, ids, **options)
        out, drows, dweights = (np.asarray(array) for array in got)

    slots = np.argsort(ids.ravel(), kind="stable")
    tokens = slots // top_k
    np.testing.assert_array_equal(out.view(np.int16), x[tokens].view(np.int16))
    products = weights.ravel()[slots, None].astype(np.float32) * dout[tokens].astype(np.float32)
    np.testing.assert_array_equal(drows.view(np.int16), products.astype(BF16).view(np.int16))
    exact = np.empty(ids.size)
    exact[slots] = (dout[tokens].astype(float) * rows.astype(float)).sum(1)
    assert dweights.dtype == weights.dtype
    rounding = 2**-8 if weights.dtype == BF16 else 2**-22
    scale = np.abs(exact).max()
    np.testing.assert_allclose(
        dweights.astype(float), exact.reshape(ids.shape), rtol=rounding, atol=2**-20 * scale
    )


# 96 tokens in blocks of 32, to 4 of 16 experts: one compilation, buffers of several chunks.
ROUTINGS = {
    "balanced": zipf_ids(96, 4, 16),
    "skewed, some experts empty": zipf_ids(96, 4, 16, 2.0),
    "one expert owns everything": np.full((96, 4), 9, np.int32),
    "each block its own experts": (np.arange(96)[:, None] // 32 * 4 + np.arange(4)).astype(
        np.int32
    ),
    # Rows of six experts in one granule, then large ones whose ends are on none.
    "experts of a row": np.where(
        np.arange(96)[:, None] < 3, np.arange(4) + [[0], [2], [4]] * 32, [[7, 8, 12, 15]]
    ).astype(np.int32),
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_no_race_and_nothing_unwritten(routing):
    check(ROUTINGS[routing], 16, 128, 32, chunk=PART, simulated=True)


def test_rows_that_fill_no_granule_and_no_block():
    check(zipf_ids(45, 3, 5), 5, 384, 32, chunk=PART, weights_dtype="bfloat16")


def test_gradients_that_are_not_finite_stay_in_their_block():
    ids, block, token, column = zipf_ids(45, 3, 5), 32, 40, 7
    options = {"num_experts": 5, "block": block, "chunk": PART, "simulated": False}
    x, dout, rows, weights = operands(ids, 384, "bfloat16")
    _, *clean = map(np.array, run_both(x, dout, rows, weights, ids, **options))
    dout[token, column], rows[3], weights[1, 2] = np.inf, np.nan, np.nan
    _, drows, dweights = map(np.array, run_both(x, dout, rows, weights, ids, **options))
    slots = np.argsort(ids.ravel(), kind="stable")
    is_weighted = slots == 3 * 1 + 2
    assert np.isnan(drows[is_weighted]).all()
    own, block_of_it = slots // 3 == token, slots // 3 >= block
    assert np.isnan(drows[block_of_it & ~own, column]).all()  # 0 times infinity
    assert not np.isfinite(drows[own, column]).any()
    drows[block_of_it, column] = clean[0][block_of_it, column]
    drows[is_weighted] = clean[0][is_weighted]
    np.testing.assert_array_equal(drows, clean[0])
    changed = np.zeros(ids.size, bool)
    changed[slots[3]] = changed[token * 3 : token * 3 + 3] = True
    changed = changed.reshape(ids.shape)
    assert not np.isfinite(dweights[changed]).any()
    np.testing.assert_array_equal(dweights[~changed], clean[1][~changed])


def test_one_choice_and_more_windows_than_granules():
    check(zipf_ids(13, 1, 4), 4, 128, 8)


# (T, K, E, D, C, skew): the grid of published tests.
GRID = (
    (256, 8, 16, 256, 128, 0.0),
    (256, 8, 128, 128, 128, 0.0),
    (384, 8, 9, 384, 128, 0.0),
    (256, 8, 32, 128, 128, 1.0),
    (512, 6, 12, 256, 256, 0.3),
    (256, 2, 5, 128, 128, 0.0),
    (256, 2, 128, 128, 128, 0.0),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("simulated", [False, True], ids=["plain", "simulated"])
@pytest.mark.parametrize("case", GRID, ids=str)
@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
def test_grid(case, simulated, weights_dtype):
    num_tokens, top_k, num_experts, width, block, skew = case
    ids = zipf_ids(num_tokens, top_k, num_experts, skew)
    check(ids, num_experts, width, block, weights_dtype=weights_dtype, simulated=simulated)


def test_words_hold_every_window():
    most = (MAX_BUFFER_ROWS - 1) // GRANULE
    for fields in ((0, 0, 0, 0), (most, most, 7, 1), (1, 0, 3, 0), (0, most, 0, 1)):
        word = unpack(pack(Window(*map(jnp.int32, fields))))
        assert (word.first, word.count, word.kept, word.open) == fields


def test_chunks_cover_the_buffer_and_fit_vmem():
    rows = chunk_rows(BLOCK, 8, 128, 2816 * 2, 4)
    assert rows == 1024
    assert stage_granules(rows, 128) == 2 * 1024 // GRANULE + 128 + 1
    assert chunk_rows(8, 1, 1, 256, 4) == 256  # no larger than the buffer
    assert chunk_rows(BLOCK, 8, 128, 16_384 * 2, 4) == 512  # half of VMEM
    lines = layout(32, 4, 16, PART)
    assert lines.num_chunks == buffer_rows(32, 4, 16) // PART
    for ids in ROUTINGS.values():
        used = np.asarray(chunks_in_use(ids, lines))
        assert (used >= 1).all() and (used <= lines.num_chunks).all()


@functools.partial(jax.jit, static_argnames="lines")
def chunks_in_use(ids, lines):
    windows = routing_windows(ids, num_experts=lines.num_groups, block=32)
    return block_table(windows.bounds, windows.shift, lines, PART)[:, 0, lines.used]
