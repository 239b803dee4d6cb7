"""Block sizes of the attention kernels: data, a VMEM model, and the choice between the two kernels.

band   a query block against all the keys its window reaches, kept in VMEM: windows that fit
flash  one query block against one key block a grid step, running softmax: everything else
"""

from __future__ import annotations

from dataclasses import dataclass

from pallas_ops.chips import V6E, Chip

_VMEM_SHARE = 0.75
"""Of VMEM for what the model counts; the rest is the compiler's temporaries and spills."""
_MAX_BAND_BLOCK = 256
_BLOCKS_PER_WINDOW = 4
"""A band of window / block + 1 blocks does 1 + 1 / this times the ideal work."""
_ROWS = 1024
"""Queries times heads a flash step, and keys of its forward: enough for one rescale to be cheap."""
_BACKWARD_KEYS = 512


@dataclass(frozen=True)
class Band:
    """Blocks of one call of the band kernels."""

    block: int
    """Queries, and keys, a block."""
    window: int
    """Keys a query sees, itself included."""

    @property
    def num_blocks(self) -> int:
        """Key blocks that the queries of one block reach."""
        return -(-(self.window + self.block - 1) // self.block)


@dataclass(frozen=True)
class Flash:
    """Blocks of one call of the flash kernels."""

    block_q: int
    """Queries a step, of every head that shares the key head."""
    block_k: int
    """Keys a step; a multiple of block_q, or the other way round."""
    window: int | None
    """Keys a query sees, itself included; None = all before it."""
    max_keys: int | None = None
    """Backward only: keys whose gradients one call keeps in VMEM; None = all."""


def choose_forward(
    length: int, num_shared: int, head_dim: int, window: int | None, itemsize: int, chip: Chip = V6E
) -> Band | Flash:
    """Blocks for [B, S = length, N, H = head_dim] with N / G = num_shared."""
    window = _reach(window, length)
    if window is not None:
        band = _band(window, chip)
        if band_vmem_bytes(band, num_shared, head_dim, itemsize, backward=False) <= _limit(chip):
            return band
    block_q = _query_block(length, num_shared, chip)
    return Flash(block_q, min(_ROWS, _round_up(length, chip)), window)


def choose_backward(
    length: int, num_shared: int, head_dim: int, window: int | None, itemsize: int, chip: Chip = V6E
) -> Band | Flash:
    """As `choose_forward`, for the fused gradient kernels."""
    window = _reach(window, length)
    if window is not None:
        band = _band(window, chip)
        if band_vmem_bytes(band, num_shared, head_dim, itemsize, backward=True) <= _limit(chip):
            return band
    block_q = _query_block(length, num_shared, chip)
    block_k = min(_BACKWARD_KEYS, _round_up(length, chip))
    steps = flash_vmem_bytes(Flash(block_q, block_k, window), num_shared, head_dim, itemsize)
    # Two fp32 accumulators a key, of whole lanes.
    key_bytes = 2 * 4 * max(head_dim, chip.num_lanes)
    max_blocks = (_limit(chip) - steps) // (key_bytes * block_k)
    if max_blocks < 1:
        raise ValueError(
            f"no blocks of attention with {num_shared} query heads a key head of {head_dim} fit "
            f"{_limit(chip)} bytes of {chip.name} VMEM; name a chip with more"
        )
    return Flash(block_q, block_k, window, max_blocks * block_k)


def band_vmem_bytes(
    band: Band, num_shared: int, head_dim: int, itemsize: int, *, backward: bool
) -> int:
    """VMEM of one band call: double-buffered blocks, the band of keys, values and (backward) their
    gradients in fp32, and the scores of a step."""
    rows, width = num_shared * band.block, head_dim
    keys = band.num_blocks * band.block
    blocks = 2 * itemsize * width * ((4 if backward else 2) * rows + 2 * band.block)
    if backward:
        blocks += 2 * itemsize * width * 2 * band.block
    held = 2 * keys * width * (itemsize + (4 if backward else 0))
    scores = (12 if backward else 6) * rows * keys + 4 * rows * width
    return blocks + held + scores


def flash_vmem_bytes(flash: Flash, num_shared: int, head_dim: int, itemsize: int) -> int:
    """VMEM of one step of the flash backward, the larger of the two, without the gradients of
    keys and values."""
    rows = num_shared * flash.block_q
    blocks = 2 * itemsize * head_dim * (4 * rows + 4 * flash.block_k)
    blocks += 2 * itemsize * head_dim * rows  # stacked queries and cotangents
    return blocks + 12 * rows * flash.block_k + 4 * rows * head_dim


def _band(window: int, chip: Chip) -> Band:
    block = _MAX_BAND_BLOCK
    while block > chip.num_lanes and block * _BLOCKS_PER_WINDOW > window:
        block //= 2
    return Band(block, window)


def _query_block(length: int, num_shared: int, chip: Chip) -> int:
    block = _ROWS // 2
    while block > chip.num_lanes and block * num_shared > _ROWS:
        block //= 2
    return min(block, _round_up(length, chip))


def _round_up(length: int, chip: Chip) -> int:
    """The smallest power of two, at least a register's lanes, that holds `length`."""
    size = chip.num_lanes
    while size < length:
        size *= 2
    return size


def _reach(window: int | None, length: int) -> int | None:
    """A window that reaches every key hides none."""
    return None if window is None or window >= length else window


def _limit(chip: Chip) -> int:
    return int(_VMEM_SHARE * chip.vmem_bytes)
