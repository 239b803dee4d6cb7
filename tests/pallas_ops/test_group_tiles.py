"""Metadata of the grouped products against (group, tile) pairs found by looking at every row."""

import functools
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given

from pallas_ops.group_tiles import group_tiles

# (rows, tile, groups): one tile, a ragged last tile, whole tiles, and more groups than rows. Few,
# because each is compiled; sizes of groups are data.
CASES = ((5, 16, 3), (77, 16, 5), (96, 32, 4), (20, 16, 24))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def compiled(group_sizes, num_rows, tile_m, visit_empty):
    return group_tiles(group_sizes, num_rows, tile_m, visit_empty=visit_empty)


@st.composite
def cases(draw):
    """A case and the sizes of its groups: ends drawn with replacement, often at a tile's edge."""
    num_rows, tile_m, num_groups = draw(st.sampled_from(CASES))
    edges = st.sampled_from([0, *range(tile_m, num_rows, tile_m), num_rows])
    end = st.one_of(edges, st.integers(0, num_rows))
    ends = sorted(draw(st.lists(end, min_size=num_groups, max_size=num_groups)))
    sizes = [end - start for start, end in itertools.pairwise([0, *ends])]
    return num_rows, tile_m, sizes


def brute_force(num_rows, tile_m, sizes, visit_empty):
    """Pairs that share a row, in row order; an empty group has the tile it would start in."""
    num_tiles = -(-num_rows // tile_m)
    owner = [group for group, size in enumerate(sizes) for _ in range(size)]
    pairs = []
    for group, size in enumerate(sizes):
        tiles = sorted({row // tile_m for row, g in enumerate(owner) if g == group})
        if not size and visit_empty:
            tiles = [min(sum(sizes[:group]) // tile_m, num_tiles - 1)]
        pairs += [(group, tile) for tile in tiles]
    return pairs


@given(cases(), st.booleans())
@example((77, 16, [0, 0, 0, 0, 0]), False)
@example((77, 16, [0, 0, 0, 0, 0]), True)
@example((77, 16, [77, 0, 0, 0, 0]), True)
@example((77, 16, [0, 0, 0, 0, 77]), True)
@example((96, 32, [32, 32, 32, 0]), True)  # an empty group after the last row
@example((20, 16, [*[1] * 20, 0, 0, 0, 0]), True)  # as many steps as the bound allows
def test_equals_brute_force(case, visit_empty):
    num_rows, tile_m, sizes = case
    meta = compiled(jnp.array(sizes, jnp.int32), num_rows, tile_m, visit_empty)
    group, tile, bounds, num_steps = map(np.asarray, meta)
    pairs = list(zip(group.tolist(), tile.tolist(), strict=True))
    expected = brute_force(num_rows, tile_m, sizes, visit_empty)

    assert {array.dtype for array in (group, tile, bounds, num_steps)} == {np.dtype(np.int32)}
    assert bounds.tolist() == [0, *itertools.accumulate(sizes)]
    assert len(pairs) == -(-num_rows // tile_m) + len(sizes) - 1
    assert num_steps.tolist() == [len(expected)]
    assert pairs[: len(expected)] == expected
    # The steps that are left over repeat the last pair, so they move no block.
    last = expected[-1] if expected else pairs[0]
    assert set(pairs[len(expected) :]) <= {last}
    assert 0 <= tile.min() and tile.max() < -(-num_rows // tile_m)
    # A block of a tile (gmm) or of a group (tgmm) is left once and for all: neighbours only.
    runs_of_groups = [g for g, _ in itertools.groupby(group.tolist())]
    assert len(set(runs_of_groups)) == len(runs_of_groups)
    runs_of_tiles = [t for t, _ in itertools.groupby(tile.tolist())]
    assert len(set(runs_of_tiles)) == len(runs_of_tiles)
