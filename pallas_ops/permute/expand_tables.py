"""What the kernels that fill rows from tokens read of the window tables, packed for SMEM.

A block's buffer is worked off in chunks of a fixed number of granules. One line a block:

    words [G] | first granule in HBM [G] | first window of each chunk [Q] | one past the last [Q]
    | chunks in use

Invariants: windows of a chunk are those with a granule in it and empty ones between; a window may
lie in several chunks; every block uses at least one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_ops.routing.blocks import GRANULE, buffer_rows

_FIELD = 12
"""Bits of a granule number or count inside a buffer."""
MAX_BUFFER_ROWS = GRANULE << _FIELD
"""Rows of a block's buffer that the packed words can number."""


@dataclass(frozen=True)
class Window:
    """Scalars of one window; granules are numbered inside the block's buffer."""

    first: jax.Array
    """First granule."""
    count: jax.Array
    """Granules whose last row is in the window: complete once the window's rows are in place."""
    kept: jax.Array
    """Rows at the start of the first granule that belong to earlier blocks or experts."""
    open: jax.Array
    """1 if rows follow the last complete granule: they begin granule `first + count`."""


def pack(window: Window) -> jax.Array:
    """int32 words of arrays."""
    return (
        window.first
        | window.count << _FIELD
        | window.kept << 2 * _FIELD
        | window.open << 2 * _FIELD + 3
    )


def unpack(word: jax.Array) -> Window:
    """The inverse of `pack`."""
    mask = (1 << _FIELD) - 1
    return Window(
        word & mask, word >> _FIELD & mask, word >> 2 * _FIELD & 7, word >> 2 * _FIELD + 3
    )


@dataclass(frozen=True)
class Layout:
    """Where the parts of a line are."""

    num_groups: int
    """G."""
    num_chunks: int
    """Q: chunks of the largest block."""

    @property
    def first_granules(self) -> int:
        """Of the first granule's number in HBM, by window."""
        return self.num_groups

    @property
    def begins(self) -> int:
        """Of the first window, by chunk."""
        return 2 * self.num_groups

    @property
    def ends(self) -> int:
        """Of one past the last window, by chunk."""
        return self.begins + self.num_chunks

    @property
    def used(self) -> int:
        """Of the number of chunks in use."""
        return self.ends + self.num_chunks

    @property
    def width(self) -> int:
        """Words a line, whole lanes."""
        return -(-(self.used + 1) // 128) * 128


def layout(block: int, top_k: int, num_groups: int, chunk: int) -> Layout:
    """For chunks of `chunk` rows."""
    assert buffer_rows(block, top_k, num_groups) < MAX_BUFFER_ROWS  # check_block allows less
    return Layout(num_groups, -(-buffer_rows(block, top_k, num_groups) // chunk))


def block_table(bounds: jax.Array, shift: jax.Array, lines: Layout, chunk: int) -> jax.Array:
    """int32 [nb, 1, width] from bounds [nb + 1, G] and shift [nb, G]."""
    first_row, end_row = bounds[:-1], bounds[1:]
    used = end_row > first_row
    open_ = used & (end_row % GRANULE != 0)
    count = jnp.where(used, end_row // GRANULE - first_row // GRANULE, 0)
    held = count + open_
    ends = jnp.cumsum(held, axis=1)
    word = pack(
        Window(
            first=ends - held,
            count=count,
            kept=jnp.where(used, first_row % GRANULE, 0),
            open=open_.astype(jnp.int32),
        )
    )
    granules = chunk // GRANULE
    edges = jnp.arange(lines.num_chunks, dtype=jnp.int32)[:, None] * granules
    begin = jnp.sum(ends[:, None] <= edges, axis=2, dtype=jnp.int32)
    end = jnp.sum((ends - held)[:, None] < edges + granules, axis=2, dtype=jnp.int32)
    chunks = -(-ends[:, -1:] // granules)
    line = jnp.concatenate([word, first_row // GRANULE, begin, end, chunks], axis=1)
    return jnp.pad(line, ((0, 0), (0, lines.width - line.shape[1])))[:, None]


def seam_table(bounds: jax.Array) -> jax.Array:
    """int32 [2, G]: what is left of each expert when all blocks are done, the rows after its last
    whole granule. Line 0: that granule in HBM. Line 1: begin | end << 4 | joined << 8 | last << 9:
    its own rows there, whether the expert before left rows in the same granule, and whether the
    next one did not. Experts that end on a granule have end 0."""
    start, end = bounds[0], bounds[-1]
    granule, stop = end // GRANULE, end % GRANULE
    begin = jnp.where(start // GRANULE == granule, start % GRANULE, 0)
    same = (granule[1:] == granule[:-1]) & (stop[1:] > 0) & (stop[:-1] > 0)
    joined = jnp.pad(same, (1, 0)).astype(jnp.int32)
    last = 1 - jnp.pad(same, (0, 1)).astype(jnp.int32)
    return jnp.stack([granule, begin | stop << 4 | joined << 8 | last << 9])
