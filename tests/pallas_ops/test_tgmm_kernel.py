"""The tgmm kernel, interpreted: as plain HLO, and as a TPU with races and memory of NaN."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings

from pallas_ops.tgmm.kernel import tgmm
from pallas_ops.tiling import Tiles
from tests.pallas_ops.simulated import without_races

NUM_ROWS = 128
SIZES = (10, 0, 73, 5, 30, 0)


def operands(num_rows, size_k, size_n, owned, dtype="float32"):
    """NaN in the rows that no group owns."""
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal((num_rows, size)) for size in (size_k, size_n)]
    for array in arrays:
        array[owned:] = np.nan
    return [array.astype(jnp.dtype(dtype)) for array in arrays]


def expected(lhs, rhs, sizes, groups):
    bounds = np.cumsum([0, *sizes])
    wide = [array.astype(np.float64) for array in (lhs, rhs)]
    rows = [slice(bounds[g], bounds[g + 1]) for g in groups]
    return np.stack([wide[0][own].T @ wide[1][own] for own in rows])


@functools.partial(jax.jit, static_argnames=("interpret", "tiles", "out_dtype", "group_offset",
                                             "num_groups"))  # fmt: skip
def interpreted(*arrays, **static):
    return tgmm(*arrays, **static)


def check(sizes, lhs, rhs, *, out_dtype="float32", tolerance=1e-4, groups=None, **static):
    first, last = groups or (0, len(sizes))
    (out,) = interpreted(
        lhs,
        rhs,
        jnp.array(sizes, jnp.int32),
        out_dtype=out_dtype,
        group_offset=first,
        num_groups=last - first,
        **static,
    )
    out = np.asarray(out, np.float64)
    np.testing.assert_allclose(
        out, expected(lhs, rhs, sizes, range(first, last)), rtol=2**-8, atol=tolerance
    )
    for size, matrix in zip(sizes[first:last], out, strict=True):
        assert size or not matrix.any()


RANGES = {"all": None, "first half": (0, 3), "second half": (3, 6), "an empty one": (1, 2)}


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("groups", RANGES)
def test_ranges_of_groups_without_races(groups, out_dtype):
    # Rows in several steps of a group; K and N in tiles, the last ones ragged.
    lhs, rhs = operands(NUM_ROWS, 200, 150, sum(SIZES))
    with without_races() as interpret:
        check(
            SIZES,
            lhs,
            rhs,
            out_dtype=out_dtype,
            groups=RANGES[groups],
            tiles=Tiles(32, 128, 128),
            interpret=interpret,
        )


EDGES = (0, 1, 15, 16, 17, 47, 48, 49, 127, 128)


@st.composite
def group_sizes(draw):
    ends = sorted(draw(st.lists(st.sampled_from(EDGES), min_size=6, max_size=6)))
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


@settings(max_examples=25)
@given(group_sizes(), st.sampled_from(["float32", "bfloat16"]))
@example([0] * 6, "float32")
@example([0, 0, 128, 0, 0, 0], "bfloat16")
@example([1] * 6, "float32")
def test_whatever_the_sizes(sizes, out_dtype):
    lhs, rhs = operands(NUM_ROWS, 24, 40, sum(sizes))
    check(sizes, lhs, rhs, out_dtype=out_dtype, tiles=Tiles(48, 24, 40), interpret=True)


def test_empty_groups_are_zero():
    # tokamax 887: G=18, K=64, N=43, M=32, groups 6 to 17 empty.
    sizes = (6, 5, 7, 4, 5, 5) + (0,) * 12
    check(sizes, *operands(32, 64, 43, 32), interpret=True)


@pytest.mark.slow
def test_whole_depths_of_a_matrix_unit():
    # 512 rows a step, one of 256 and the rest of one, as on the chip.
    sizes = (700, 0, 300, 1, 260, 511, 13)
    lhs, rhs = operands(1808, 16, 24, sum(sizes), "bfloat16")
    check(sizes, lhs, rhs, tolerance=1e-3, interpret=True)


def test_no_rows():
    (out,) = tgmm(
        jnp.zeros((0, 8)), jnp.zeros((0, 4)), jnp.zeros(3, jnp.int32), out_dtype="bfloat16",
        interpret=True,
    )  # fmt: skip
    assert (out.shape, out.dtype) == ((3, 8, 4), jnp.bfloat16) and not out.any()
