"""Blocks of tokens and their buffers: the numbers that window tables and kernels agree on."""

BLOCK = 256
"""C: tokens a block."""
GRANULE = 8
"""A: rows of one memory tile of bf16, as XLA lays it out in HBM."""
RING = 3
"""Buffers in the ring: of the block before, of this one, and the one that is being filled."""
_MAX_ROWS = 1 << 15
"""Two row numbers of the ring are looked up in one int32."""


def buffer_rows(block: int, top_k: int, num_groups: int) -> int:
    """J, rows of a buffer that holds any block: each window that is not empty adds at most
    GRANULE - 1 rows at either end. A multiple of 256."""
    num_slots = block * top_k
    rows = num_slots + 2 * (GRANULE - 1) * min(num_groups, num_slots)
    return -(-rows // 256) * 256


def check_block(block: int, top_k: int, num_groups: int) -> None:
    """Raises ValueError for a block of tokens that the window tables cannot describe."""
    if block < 1 or block % GRANULE:
        raise ValueError(f"block is {block}; it must be a positive multiple of {GRANULE}")
    rows = RING * buffer_rows(block, top_k, num_groups) + GRANULE
    if rows > _MAX_ROWS:
        raise ValueError(
            f"block is {block}: {RING} buffers of tokens to {top_k} of {num_groups} experts have "
            f"{rows} rows, more than {_MAX_ROWS}; choose smaller blocks"
        )
