"""gmm's kernel: its visits, interpreted as HLO at every boundary, and in the TPU interpreter.

The TPU interpreter starts memory as NaN and reports races and reads past the end; the plain one is
quick enough for many sizes of groups.
"""

import functools
import itertools
from contextlib import nullcontext

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given

from pallas_ops.gmm.kernel import gmm
from pallas_ops.gmm.visits import KEEP, ZERO, make_visits
from pallas_ops.tiling import Tiles, row_buckets
from tests.pallas_ops.simulated import without_races

TOLERANCE = {"float32": 1e-4, "bfloat16": 2**-8 * 60}  # half a unit of the largest sum


def expected_product(lhs, rhs, sizes, transpose_rhs, offset, kept):
    """fp64, group by group; rows of other groups from `kept`, or zero."""
    size_n = rhs.shape[1 if transpose_rhs else 2]
    out = np.zeros((lhs.shape[0], size_n)) if kept is None else kept.astype(np.float64)
    ends = np.cumsum(sizes)
    for matrix, size, end in zip(rhs, sizes[offset:], ends[offset:], strict=False):
        matrix = matrix.astype(np.float64)
        rows = slice(end - size, end)
        out[rows] = lhs[rows].astype(np.float64) @ (matrix.T if transpose_rhs else matrix)
    return out


def operands(shape, sizes, num_groups, transpose_rhs, offset, dtype, keeps):
    """Random values rounded to `dtype`; NaN in the rows of lhs that the call has no group for, and
    in the rows of partial_sum that it has one for."""
    num_rows, size_k, size_n = shape
    draw = np.random.default_rng(0)
    weight = (size_n, size_k) if transpose_rhs else (size_k, size_n)
    shapes = [(num_rows, size_k), (num_groups, *weight), (num_rows, size_n)]
    lhs, rhs, kept = (draw.standard_normal(s).astype(jnp.dtype(dtype)) for s in shapes)
    row, bounds = np.arange(num_rows), np.cumsum([0, *sizes])
    own = (row >= bounds[offset]) & (row < bounds[offset + num_groups])
    lhs[~own] = np.nan
    kept[own] = np.nan
    return lhs, rhs, kept if keeps else None


STATIC = ("transpose_rhs", "group_offset", "interpret", "tiles")
compiled = jax.jit(gmm, static_argnames=STATIC)


def check(
    shape, sizes, *, num_groups, transpose_rhs, offset, keeps, tiles, dtype="float32", strict=False
):
    arrays = operands(shape, sizes, num_groups, transpose_rhs, offset, dtype, keeps)
    lhs, rhs, kept = arrays
    with without_races() if strict else nullcontext(True) as interpret:
        (out,) = compiled(
            lhs,
            rhs,
            jnp.array(sizes, jnp.int32),
            kept,
            transpose_rhs=transpose_rhs,
            group_offset=offset,
            interpret=interpret,
            tiles=tiles,
        )
        out = np.asarray(out, np.float64)
    want = expected_product(lhs, rhs, sizes, transpose_rhs, offset, kept)
    np.testing.assert_allclose(out, want, rtol=0, atol=TOLERANCE[dtype])
    zero = ~np.any(want, axis=1)
    assert not out[zero].any()


# 45 rows, K = 200, N = 150 and tiles of 16 rows and 128 columns: no multiple of a tile anywhere.
STRICT_SIZES = {
    "ragged, a tail": [10, 0, 25, 3],
    "ends on tiles": [16, 0, 29, 0],
    "all empty": [0, 0, 0, 0],
    "one giant": [0, 45, 0, 0],
}
STRICT_CASES = [(sizes, "float32", False) for sizes in STRICT_SIZES]
STRICT_CASES += [("ragged, a tail", "float32", True), ("ragged, a tail", "bfloat16", False)]


@pytest.mark.parametrize(("split", "dtype", "transpose_rhs"), STRICT_CASES)
def test_tpu_interpreter(split, dtype, transpose_rhs):
    check(
        (45, 200, 150),
        STRICT_SIZES[split],
        num_groups=4,
        transpose_rhs=transpose_rhs,
        offset=0,
        keeps=False,
        tiles=Tiles(16, 200, 128),
        dtype=dtype,
        strict=True,
    )


# The interpreter takes no ragged block for an operand that is also the result: whole tiles.
@pytest.mark.parametrize("sizes", [[10, 20, 0, 7], [0, 0, 3, 16], [16, 16, 16, 0], [5, 0, 0, 9]])
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_tpu_interpreter_keeps_other_groups(sizes, transpose_rhs):
    check(
        (48, 200, 256),
        sizes,
        num_groups=2,
        transpose_rhs=transpose_rhs,
        offset=1,
        keeps=True,
        tiles=Tiles(16, 200, 128),
        strict=True,
    )


# Two whole tiles and a part: parts of every size that is computed. With transpose_rhs a tile of
# 256 rows is the held operand.
NUM_ROWS, TILE_M, NUM_GROUPS = 600, 256, 4
EDGES = (0, 1, 63, 64, 65, 192, 193, 255, 256, 257, 511, 512, 513, 600)


@st.composite
def group_sizes(draw):
    """Ends of groups drawn with replacement, often beside the edge of a tile or of a part."""
    end = st.one_of(st.sampled_from(EDGES), st.integers(0, NUM_ROWS))
    ends = sorted(draw(st.lists(end, min_size=NUM_GROUPS, max_size=NUM_GROUPS)))
    return [end - start for start, end in itertools.pairwise([0, *ends])]


RANGES = st.sampled_from([(0, 4, False), (1, 2, False), (1, 2, True), (0, 1, True), (3, 1, True)])


@given(group_sizes(), RANGES, st.booleans())
@example([0, 0, 0, 0], (0, 4, False), True)
@example([0, 0, 0, 0], (1, 2, True), True)
@example([300, 0, 0, 300], (1, 2, True), False)
@example([0, 0, 0, 600], (3, 1, True), True)
@example([600, 0, 0, 0], (3, 1, True), False)
@example([256, 256, 0, 88], (1, 2, True), True)
@example([1, 1, 1, 1], (1, 2, False), False)
def test_whatever_the_sizes(sizes, groups, transpose_rhs):
    offset, num_groups, keeps = groups
    check(
        (NUM_ROWS, 24, 40),
        sizes,
        num_groups=num_groups,
        transpose_rhs=transpose_rhs,
        offset=offset,
        keeps=keeps,
        tiles=Tiles(TILE_M, 24, 40),
    )


def test_fewer_rows_than_a_tile_and_columns_in_parts():
    for transpose_rhs in (False, True):
        check(
            (7, 40, 300),
            [3, 0, 4],
            num_groups=3,
            transpose_rhs=transpose_rhs,
            offset=0,
            keeps=False,
            tiles=Tiles(16, 40, 128),
        )


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def visits_of(sizes, num_rows, tile_m, offset, num_groups, rest):
    return make_visits(
        sizes, num_rows, tile_m, group_offset=offset, num_groups=num_groups, rest=rest
    )


def brute_force(sizes, num_rows, tile_m, offset, num_groups, rest):
    """(group, ZERO or KEEP, tile, own rows of the tile), found by looking at every row."""
    owner = [g for g, size in enumerate(sizes) for _ in range(size)]
    owner += [len(sizes)] * (num_rows - len(owner))
    inside = range(offset, offset + num_groups)
    segment = [g if g in inside else -1 if g < offset else len(sizes) for g in owner]
    found = []
    for row, tile in enumerate(r // tile_m for r in range(num_rows)):
        if not found or found[-1][:2] != (segment[row], tile):
            found.append((segment[row], tile, []))
        found[-1][2].append(row % tile_m)
    before = [v for v in found if v[0] == -1]
    after = [v for v in found if v[0] == len(sizes)]
    own = found[len(before) : len(found) - len(after)]
    codes = [KEEP if side == "keep" else ZERO for side in rest]
    before = [(codes[0], *v[1:]) for v in before][-1 if rest[0] != "zero" else 0 :]
    after = [(codes[1], *v[1:]) for v in after][: 1 if rest[1] != "zero" else None]
    return [*before, *((g - offset, tile, rows) for g, tile, rows in own), *after]


SIDES = st.sampled_from(["zero", "keep", "leave"])


@given(group_sizes(), RANGES, SIDES, SIDES)
@example([0, 0, 0, 0], (1, 2, True), "keep", "keep")
@example([600, 0, 0, 0], (1, 2, True), "keep", "leave")
@example([0, 0, 0, 600], (1, 2, True), "zero", "leave")
@example([150, 150, 150, 150], (0, 4, False), "zero", "zero")
def test_visits_equal_brute_force(sizes, groups, before, after):
    offset, num_groups, _ = groups
    arguments = (NUM_ROWS, TILE_M, offset, num_groups, (before, after))
    visits, num_visits = visits_of(jnp.array(sizes, jnp.int32), *arguments)
    assert {array.dtype for array in visits} == {np.dtype(np.int32)}
    visits = type(visits)(*(array.tolist() for array in visits))
    expected = brute_force(sizes, *arguments)
    assert 1 <= int(num_visits) == len(expected) <= len(visits.tile)
    got = [
        (
            visits.order[rank] if rank >= 0 else rank,
            visits.tile[v],
            list(range(visits.first[v], visits.end[v])),
        )
        for v, rank in enumerate(visits.rank[: int(num_visits)])
    ]
    assert got == expected
    used = [g for g, _ in itertools.groupby(v[0] for v in expected) if g >= 0]
    assert visits.num_used == [len(used)] and visits.order[: len(used)] == used
    for v, (group, tile, _) in enumerate(expected):
        assert group == ZERO or (visits.lhs_tile if group >= 0 else visits.kept_tile)[v] == tile
    # Blocks of lhs move no more often than its tiles with a group need, and are addresses of it.
    reads = [t for t, _ in itertools.groupby(visits.lhs_tile[: len(expected)])]
    assert len(reads) == max(1, len({tile for group, tile, _ in expected if group >= 0}))
    assert 0 <= min(visits.tile) and max(visits.tile) < -(-NUM_ROWS // TILE_M)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4), RANGES, SIDES, SIDES)
@example([NUM_ROWS, 1, NUM_ROWS, 5], (0, 4, False), "zero", "zero")
@example([NUM_ROWS, -NUM_ROWS, NUM_ROWS, -1], (0, 4, False), "zero", "keep")
@example([2**31 - 1] * 4, (1, 2, True), "leave", "keep")
def test_no_sizes_make_an_address_outside(sizes, groups, before, after):
    # The kernel's copies are compiled without checks of their bounds.
    offset, num_groups, _ = groups
    visits, num_visits = visits_of(
        jnp.array(sizes, jnp.int32), NUM_ROWS, TILE_M, offset, num_groups, (before, after)
    )
    assert 1 <= num_visits <= len(visits.tile)
    for tile in (visits.tile, visits.lhs_tile, visits.kept_tile):
        assert 0 <= tile.min() and tile.max() < -(-NUM_ROWS // TILE_M)
    used = int(visits.num_used[0])
    assert 0 <= visits.order.min() and visits.order.max() < num_groups
    rank = np.asarray(visits.rank[:num_visits])
    live = rank >= 0
    # Each matrix that is sent for is waited for.
    assert used <= num_groups and np.unique(rank[live]).tolist() == list(range(used))
    first, end = (np.asarray(table[:num_visits])[live] for table in (visits.first, visits.end))
    assert (0 <= first).all() and (first < end).all() and (end <= TILE_M).all()


def test_row_buckets_round_up_little():
    assert row_buckets(512) == (64, 128, 192, 256, 320, 384, 448, 512)
    assert row_buckets(16) == (16,)
    assert row_buckets(112) == (64, 112)


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (Tiles(16, 64, 136), "tile_k=64 cuts K=96; give tile_k=96"),
        (Tiles(16, 96, 72), "tile_n=72 cuts N=136 inside 128 lanes; give a .*, or tile_n=136"),
    ],
)
def test_tiles_that_cut_are_refused(tiles, message):
    lhs, rhs, sizes = jnp.zeros((16, 96)), jnp.zeros((1, 96, 136)), jnp.array([16])
    with pytest.raises(ValueError, match=f"gmm: {message}"):
        gmm(lhs, rhs, sizes, transpose_rhs=False, interpret=True, tiles=tiles)
