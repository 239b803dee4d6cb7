"""Which rows belong to a block of tokens: the tables that the dispatch kernels share.

Tokens are cut into blocks of C. Rows are sorted by expert, then token, then k, so the rows of block
b that go to expert g are one run of neighbours, its *window*:

    rows [bounds[b, g], bounds[b + 1, g])

A kernel keeps one block's rows in a VMEM buffer, window after window in order of g. HBM is
addressed in granules of A rows, so a window takes the granules that it touches:

    first = bounds[b, g] rounded down to A,  last = bounds[b + 1, g] rounded up to A
    buffer row of row r of (b, g) = r + shift[b, g],  shift[b, g] = used rows before g - first

Empty windows take nothing. Invariants, for every block:

- buffer segments of windows are disjoint, in order of g, and begin and end on granules;
- used rows <= buffer_rows(C, K, G, A);
- windows of one expert are neighbours: the last granule of (b, g) is the first of (b + 1, g)
  unless bounds[b + 1, g] is a multiple of A;
- a granule that holds rows of two experts is in both segments.

Nothing is sorted, gathered or scattered: counts, prefix sums and compare-and-sum in exact int32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 256
"""C: tokens a block."""
GRANULE = 8
"""A: rows that HBM is addressed by in one copy, for 16- and 32-bit elements."""


class Windows(NamedTuple):
    """Tables of T tokens in nb = ceil(T / C) blocks; all int32."""

    bounds: jax.Array
    """[nb + 1, G] first row of expert g that belongs to block b or a later one; the last line is
    the end of each expert."""
    shift: jax.Array
    """[nb, G] buffer row minus row, for the rows of window (b, g); 0 where it is empty."""
    position: jax.Array
    """[nb * C, K] buffer row of slot (t, k); 0 for tokens past T."""


def buffer_rows(block: int, top_k: int, num_groups: int, granule: int = GRANULE) -> int:
    """J, rows of a buffer that holds any block: each window that is not empty adds at most
    granule - 1 rows at either end. A multiple of 256."""
    num_slots = block * top_k
    rows = num_slots + 2 * (granule - 1) * min(num_groups, num_slots)
    return -(-rows // 256) * 256


def routing_windows(
    expert_ids: jax.Array, *, num_experts: int, block: int = BLOCK, granule: int = GRANULE
) -> Windows:
    """expert_ids int32 [T, K] -> Windows. T and K may be any; ids may repeat inside a token."""
    num_tokens, top_k = expert_ids.shape
    num_blocks = -(-num_tokens // block)
    # Padding belongs to no expert.
    padding = ((0, num_blocks * block - num_tokens), (0, 0))
    ids = jnp.pad(expert_ids, padding, constant_values=num_experts)
    ids = ids.reshape(num_blocks, block, top_k)
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    chosen = ids[..., None] == experts  # [nb, C, K, G]
    per_token = jnp.sum(chosen, axis=2, dtype=jnp.int32)  # [nb, C, G]
    counts = jnp.sum(per_token, axis=1)
    sizes = jnp.sum(counts, axis=0)
    start = jnp.cumsum(sizes) - sizes
    before = jnp.cumsum(counts, axis=0)
    bounds = start + jnp.concatenate([jnp.zeros((1, num_experts), jnp.int32), before])

    first = bounds[:-1] // granule * granule
    last = -(-bounds[1:] // granule) * granule
    length = jnp.where(counts > 0, last - first, 0)
    offset = jnp.cumsum(length, axis=1) - length
    shift = jnp.where(counts > 0, offset - first, 0)

    # Slots of the same expert that come earlier in the block: of earlier tokens, then of this one.
    # A TPU multiplies these in bf16, which holds a token's counts exactly, and sums in fp32.
    earlier = jnp.tri(block, k=-1, dtype=jnp.float32)
    rank = jnp.einsum("ij,bjg->big", earlier, per_token.astype(jnp.float32)).astype(jnp.int32)
    entry = (bounds[:-1] + shift)[:, None] + rank  # [nb, C, G] where the token's first row goes
    position = jnp.sum(jnp.where(chosen, entry[:, :, None], 0), axis=3, dtype=jnp.int32)
    same = (ids[..., :, None] == ids[..., None, :]) & jnp.tri(top_k, k=-1, dtype=bool)
    position += jnp.where(ids < num_experts, jnp.sum(same, axis=3, dtype=jnp.int32), 0)
    return Windows(bounds, shift, position.reshape(-1, top_k))
