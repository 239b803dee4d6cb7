"""Tiles: what is chosen fits VMEM and the hardware's multiples, at every size."""

import itertools
from dataclasses import replace

import pytest

from pallas_ops.chips import MIB, V6E
from pallas_ops.gmm import shapes as gmm_shapes
from pallas_ops.tiling import (
    Tiles,
    choose_gmm_tiles,
    gmm_vmem_bytes,
)

GRID = list(
    itertools.product(
        (1, 15, 16, 77, 4096, 262_144),  # rows
        (1, 43, 128, 704, 2816, 16_384),  # k
        (1, 72, 129, 1408, 5632, 16_384),  # n
        (1, 8, 128, 384),  # groups
    )
)


def check(tiles, num_rows, k, n):
    assert tiles.tile_m % V6E.row_group == 0
    assert tiles.tile_m < max(num_rows, 1) + V6E.row_group  # no tile of padding alone
    assert tiles.tile_k == k or (tiles.tile_k < k and tiles.tile_k % V6E.num_lanes == 0)
    assert tiles.tile_n == n or (tiles.tile_n < n and tiles.tile_n % V6E.num_lanes == 0)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_gmm_tiles_fit(itemsize, keeps):
    for num_rows, k, n, num_groups in GRID:
        tiles = choose_gmm_tiles(num_rows, k, n, num_groups, itemsize, num_blocks=1 + keeps)
        check(tiles, num_rows, k, n)
        assert tiles.tile_k == k
        assert gmm_vmem_bytes(tiles, itemsize, num_blocks=1 + keeps) <= 96 * MIB


@pytest.mark.parametrize("shape", gmm_shapes.GEMMA4_26B, ids=lambda shape: shape.name)
def test_production_gmm_takes_k_and_n_whole(shape):
    # Each weight and each row is then read once.
    k, n = shape.size_k, shape.size_n
    tiles = choose_gmm_tiles(shape.num_rows, k, n, shape.num_groups, 2)
    assert tiles == Tiles(512, k, n)


def test_vmem_model_counts_every_block():
    tiles = Tiles(16, 128, 256)
    blocks = 16 * 128 + 128 * 256 + 16 * 256
    assert gmm_vmem_bytes(tiles, 2) == 2 * 2 * blocks + 4 * 16 * 256
    kept = gmm_vmem_bytes(tiles, 2, num_blocks=2)
    assert kept == gmm_vmem_bytes(tiles, 2) + 2 * 2 * 16 * 256


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "tile_m"),
    [(262_144, 128, 512), (32_768, 128, 256), (16_384, 128, 128), (512, 128, 128), (20, 1, 32)],
)
def test_row_tile_is_near_the_mean_group(num_rows, num_groups, tile_m):
    assert choose_gmm_tiles(num_rows, 128, 128, num_groups, 2).tile_m == tile_m


def test_a_small_chip_gets_small_tiles_or_an_error():
    small = replace(V6E, name="small", vmem_bytes=4 * MIB)
    tiles = choose_gmm_tiles(4096, 2816, 1408, 8, 2, small)
    assert tiles.tile_k == 2816 and gmm_vmem_bytes(tiles, 2) <= 3 * MIB
    none = replace(V6E, name="tiny", vmem_bytes=16 * 1024)
    with pytest.raises(ValueError, match=r"fit 12288 bytes of tiny VMEM; name a chip with more"):
        choose_gmm_tiles(4096, 2816, 1408, 8, 2, none)


@pytest.mark.parametrize("field", ["tile_m", "tile_k", "tile_n"])
@pytest.mark.parametrize("value", [0, -16, 16.0])
def test_tiles_must_be_positive_integers(field, value):
    with pytest.raises(ValueError, match=rf"Tiles\.{field}={value} must be a positive integer"):
        Tiles(**{"tile_m": 16, "tile_k": 128, "tile_n": 128, field: value})


def test_row_tile_must_be_addressable():
    with pytest.raises(ValueError, match=r"Tiles\.tile_m=24 must be a multiple of 16"):
        Tiles(24, 128, 128)
