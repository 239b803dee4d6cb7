"""Blocks of tokens and their buffers: the numbers that window tables and kernels agree on."""

BLOCK = 256
"""C: tokens a block."""
GRANULE = 8
"""A: rows of one memory tile, for 16- and 32-bit elements."""
RING = 3
"""Buffers in the ring: of the block before, of this one, and the one that is being filled."""


def buffer_rows(block: int, top_k: int, num_groups: int) -> int:
    """J, rows of a buffer that holds any block: each window that is not empty adds at most
    GRANULE - 1 rows at either end. A multiple of 256."""
    num_slots = block * top_k
    rows = num_slots + 2 * (GRANULE - 1) * min(num_groups, num_slots)
    return -(-rows // 256) * 256
