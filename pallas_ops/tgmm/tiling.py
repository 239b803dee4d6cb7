"""Tiles and VMEM of the transposed grouped matmul."""

from __future__ import annotations

import itertools

from pallas_ops.chips import V6E, Chip
from pallas_ops.tiling import Tiles

NUM_BUFFERS = 4
"""Steps whose rows VMEM holds: one is multiplied while those of three more arrive."""
_MAX_TILE_M = 512
_NUM_PIECES = 8
"""Pieces that a result leaves in: about as many as a group of 2,048 rows has steps, twice."""
_VMEM_SHARE = 0.75
"""Of VMEM for the buffers the model counts; the rest is the compiler's temporaries and spills."""


def vmem_bytes(tiles: Tiles, itemsize: int) -> int:
    """VMEM of one call: the ring of rows, and two fp32 results, or one and two of half the size."""
    m, k, n = tiles.tile_m, tiles.tile_k, tiles.tile_n
    return NUM_BUFFERS * itemsize * m * (k + n) + 8 * k * n


def choose_tiles(num_rows: int, k: int, n: int, itemsize: int, chip: Chip = V6E) -> Tiles:
    """Whole k and n, so that every row is read once; else the parts that read the least again.

    Rows are multiplied as deep as a matrix unit, so a tile is whole depths, or all rows there are.
    Raises ValueError when not even the least fits.
    """
    limit = int(_VMEM_SHARE * chip.vmem_bytes)
    found = {}
    for parts_k, parts_n in itertools.product(
        *(range(1, -(-x // chip.num_lanes) + 1) for x in (k, n))
    ):
        tiles = Tiles(
            row_tile(num_rows, chip=chip), _part(k, parts_k, chip), _part(n, parts_n, chip)
        )
        if vmem_bytes(tiles, itemsize) <= limit:
            found.setdefault(k * parts_n + n * parts_k, tiles)
    if not found:
        raise ValueError(
            f"no tiles of tgmm fit {limit} bytes of {chip.name} VMEM; name a chip with more"
        )
    return found[min(found)]


def row_tile(num_rows: int, most: int = _MAX_TILE_M, chip: Chip = V6E) -> int:
    """Rows a step: no more than there are, nor than `most`, in depths of a matrix unit when more
    than one."""
    rows = min(most, -(-num_rows // chip.row_group) * chip.row_group)
    return rows if rows < chip.mxu_width else rows // chip.mxu_width * chip.mxu_width


def _part(size: int, num_parts: int, chip: Chip) -> int:
    return size if num_parts == 1 else -(-size // (num_parts * chip.num_lanes)) * chip.num_lanes


def tile_columns(tile: int, size: int, name: str, chip: Chip = V6E) -> int:
    """The columns of a tile: all of them, or whole lanes. Raises ValueError for other tiles."""
    if tile < size and tile % chip.num_lanes:
        raise ValueError(
            f"tile_{name}={tile} of {size} columns is no multiple of {chip.num_lanes}; round it up,"
            f" or give {size}"
        )
    return min(tile, size)


def copy_sizes(tile_m: int, chip: Chip = V6E) -> list[int]:
    """Row counts of which few make up any number of row groups to tile_m, the largest first."""
    sizes = [tile_m]
    while sizes[-1] > chip.row_group:
        sizes.append(max(chip.row_group, sizes[-1] // 8 // chip.row_group * chip.row_group))
    return sizes


def piece_rows(tile_k: int, chip: Chip = V6E) -> int:
    """Rows of the pieces that a result of tile_k rows, whole row groups, leaves in."""
    return -(-tile_k // (chip.row_group * _NUM_PIECES)) * chip.row_group
