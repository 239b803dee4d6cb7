"""Steps and tiles of tgmm: every row of a group once, every result sent once, all in VMEM."""

import itertools
from dataclasses import replace

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given

from pallas_ops.chips import MIB, V6E
from pallas_ops.tgmm import tiling
from pallas_ops.tgmm.shapes import GEMMA4_26B
from pallas_ops.tgmm.steps import group_steps
from pallas_ops.tiling import Tiles

NUM_ROWS, PIECES = 400, 8
EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 399, 400)


@st.composite
def group_sizes(draw):
    """Ends of seven groups drawn with replacement, often beside an edge of rows or steps."""
    end = st.one_of(st.sampled_from(EDGES), st.integers(0, NUM_ROWS))
    ends = sorted(draw(st.lists(end, min_size=7, max_size=7)))
    return [b - a for a, b in itertools.pairwise([0, *ends])]


@given(group_sizes(), st.sampled_from([16, 48, 64]), st.integers(0, 6), st.data())
@example([0] * 7, 16, 0, None)
@example([0, 0, 400, 0, 0, 0, 0], 64, 2, None)
@example([1] * 7, 16, 3, None)
def test_steps_cover_each_group_once(sizes, tile_m, group_offset, data):
    num_groups = 7 - group_offset
    if data is not None:
        num_groups = data.draw(st.integers(1, num_groups))
    steps = group_steps(
        jnp.array(sizes, jnp.int32),
        NUM_ROWS,
        tile_m=tile_m,
        num_pieces=PIECES,
        group_offset=group_offset,
        num_groups=num_groups,
    )
    *tables, num_steps = (np.asarray(table) for table in steps)
    live = int(num_steps[0])
    assert live + 2 <= len(tables[0])  # the kernel looks two past the last
    assert set(tables[0][live:]) == {num_groups} and not tables[3][live:].any()
    rows, sent = [[] for _ in range(num_groups)], [0] * (num_groups + 1)
    previous = 0
    for group, row, skip, length, written in zip(
        *(table[: live + 1].tolist() for table in tables), strict=True
    ):
        assert group in (previous, previous + 1)  # in order, none left out
        previous = group
        assert row % 16 == 0 and 0 <= skip < 16 and length <= tile_m
        assert sent[group] <= written <= PIECES
        sent[group] = written  # of the group before
        if group < num_groups:
            rows[group] += range(row + skip, row + length)
    assert sent[1:] == [PIECES] * num_groups
    bounds = np.cumsum([0, *sizes])[group_offset:]
    assert rows == [list(range(bounds[g], bounds[g + 1])) for g in range(num_groups)]


@pytest.mark.parametrize("tile_m", [16, 32, 48, 77 // 16 * 16, 256, 512])
def test_copies_make_up_any_number_of_row_groups(tile_m):
    sizes = tiling.copy_sizes(tile_m)
    assert sizes[0] == tile_m and sizes[-1] == 16
    for rows in range(0, tile_m + 1, 16):
        count = 0
        for size in sizes:
            count += rows // size
            rows %= size
        assert rows == 0 and count <= 12


GRID = list(
    itertools.product((1, 15, 16, 77, 300, 262_144), (1, 43, 128, 704, 7168), (72, 2816, 16_384))
)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit(itemsize):
    for num_rows, k, n in GRID:
        tiles = tiling.choose_tiles(num_rows, k, n, itemsize)
        assert tiling.vmem_bytes(tiles, itemsize) <= 96 * MIB
        assert tiles.tile_m < num_rows + V6E.row_group  # copies stay inside the rows
        assert tiles.tile_m < 256 or tiles.tile_m % 256 == 0
        for name, tile, size in (("k", tiles.tile_k, k), ("n", tiles.tile_n, n)):
            assert tiling.tile_columns(tile, size, name) == tile


@pytest.mark.parametrize("shape", GEMMA4_26B, ids=lambda shape: shape.name)
def test_production_reads_every_row_once(shape):
    tiles = tiling.choose_tiles(shape.num_rows, shape.size_k, shape.size_n, 2)
    assert tiles == Tiles(512, shape.size_k, shape.size_n)
    assert 8 * tiling.piece_rows(shape.size_k) >= shape.size_k


def test_cut_results_are_cut_where_least_is_read_again():
    # Cutting N reads lhs twice; with the wider rhs that is the cheaper cut.
    assert tiling.choose_tiles(4096, 4096, 4096 + 128, 2) == Tiles(512, 4096, 2176)
    small = replace(V6E, vmem_bytes=MIB)
    with pytest.raises(ValueError, match="no tiles of tgmm fit 786432 bytes of v6e VMEM"):
        tiling.choose_tiles(4096, 256, 256, 2, small)


def test_tiles_that_cut_lanes():
    with pytest.raises(ValueError, match="tile_n=100 of 300 columns is no multiple of 128"):
        tiling.tile_columns(100, 300, "n")
    assert tiling.tile_columns(500, 300, "n") == 300
