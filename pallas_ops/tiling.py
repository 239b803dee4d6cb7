"""Tiles of the grouped matmuls, and gmm's choice: the largest that its VMEM model admits.

gmm   out[m, n] = lhs[m, k] rhs[g, k, n]    one row tile of one group a step
tgmm  out[g, k, n] += lhs[m, k] rhs[m, n]   its choice: tgmm/tiling.py
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_ops.chips import V6E, Chip

_VMEM_SHARE = 0.75
"""Of VMEM for the blocks the model counts; the rest is the compiler's temporaries and spills."""
_MAX_TILE_M = 512
_MIN_TILE_M = 128
_ROW_BUCKET = 64
"""Rows that gmm rounds a part of a tile up to: below, the matrix units wait for weights anyway."""


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of one grouped matmul call."""

    tile_m: int
    """Rows a step."""
    tile_k: int
    """Contracted columns (gmm) or output rows (tgmm) a step."""
    tile_n: int
    """Output columns a step."""

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_k", "tile_n"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise ValueError(f"Tiles.{name}={value!r} must be a positive integer")
        if self.tile_m % V6E.row_group:
            raise ValueError(
                f"Tiles.tile_m={self.tile_m} must be a multiple of {V6E.row_group}, the rows that "
                "bf16 memory is addressed by; round it up"
            )


def row_buckets(tile_m: int) -> tuple[int, ...]:
    """Row counts that gmm computes a tile or a part of it with, ascending."""
    return (*range(_ROW_BUCKET, tile_m, _ROW_BUCKET), tile_m)


def gmm_vmem_bytes(tiles: Tiles, itemsize: int, *, num_blocks: float = 1) -> int:
    """VMEM of one gmm call: blocks and matrices twice, and one fp32 product before it is rounded.

    `num_blocks` counts the blocks beside lhs in blocks of the product: a partial_sum is one more, a
    gated result half of one.
    """
    m, k, n = tiles.tile_m, tiles.tile_k, tiles.tile_n
    return 2 * itemsize * (m * k + k * n + int(m * n * num_blocks)) + 4 * m * n


def choose_gmm_tiles(
    num_rows: int,
    k: int,
    n: int,
    num_groups: int,
    itemsize: int,
    chip: Chip = V6E,
    *,
    num_blocks: float = 1,
) -> Tiles:
    """Whole k, and whole n where it fits, else the most columns that do, in equal parts of whole
    lanes; row tiles near the mean group.

    Raises ValueError when the fewest rows and columns do not fit.
    """
    limit = int(_VMEM_SHARE * chip.vmem_bytes)
    tile_m = _row_tile(num_rows, num_groups)
    while True:
        for num_parts in range(1, max(2, -(-n // chip.num_lanes) + 1)):
            lanes = -(-n // (num_parts * chip.num_lanes)) * chip.num_lanes
            tiles = Tiles(tile_m, k, n if num_parts == 1 else lanes)
            if gmm_vmem_bytes(tiles, itemsize, num_blocks=num_blocks) <= limit:
                return tiles
        if tile_m <= chip.row_group:
            raise ValueError(_nothing_fits(limit, chip))
        tile_m = _halve(tile_m, chip.row_group)


def _row_tile(num_rows: int, num_groups: int) -> int:
    mean = max(1, num_rows // max(1, num_groups))
    tile = _MAX_TILE_M
    while tile > _MIN_TILE_M and tile > mean:
        tile //= 2
    rows = -(-num_rows // V6E.row_group) * V6E.row_group
    return max(V6E.row_group, min(tile, rows))


def _nothing_fits(limit: int, chip: Chip) -> str:
    return (
        f"no tiles of a grouped matmul fit {limit} bytes of {chip.name} VMEM; name a chip with more"
    )


def _halve(size: int, multiple: int) -> int:
    return max(multiple, -(-(size // 2) // multiple) * multiple)
