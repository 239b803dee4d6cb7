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

So that no granule is fetched for two blocks, a kernel that reads rows keeps the buffers of three
blocks in a ring. The first granule of (b, g) is *held* if it was in the buffer of block b - 1 and
not held there itself:

    held[b, g] = bounds[b - 1, g] <= first < bounds[b, g]

Its rows stay where they are. Any other granule is fetched into the buffer of its own block, without
gaps in order of g.

Nothing is sorted, gathered or scattered: counts, prefix sums and compare-and-sum in exact int32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_ops.routing.blocks import BLOCK, GRANULE, RING, buffer_rows


class Windows(NamedTuple):
    """Tables of T tokens in nb = ceil(T / C) blocks; all int32."""

    bounds: jax.Array
    """[nb + 1, G] first row of expert g that belongs to block b or a later one; the last line is
    the end of each expert."""
    shift: jax.Array
    """[nb, G] buffer row minus row, for the rows of window (b, g); 0 where it is empty."""
    position: jax.Array
    """[nb * C, K] buffer row of slot (t, k); 0 for tokens past T."""
    ring: jax.Array
    """[nb * C, K] the slot's row in the ring of RING * J rows, where block b's buffer begins at
    (b mod RING) * J: in the buffer of its own block, or of the block before if it is held there; 0
    for tokens past T."""
    fetch: jax.Array
    """[nb, 3, G] granules to fetch for (b, g): the first, its place in block b's buffer, and how
    many, neighbours in both."""


def routing_windows(expert_ids: jax.Array, *, num_experts: int, block: int = BLOCK) -> Windows:
    """expert_ids int32 [T, K] -> Windows. T and K may be any; ids may repeat inside a token."""
    num_tokens, top_k = expert_ids.shape
    num_blocks = -(-num_tokens // block)
    # Padding belongs to no expert. Tokens last: sums over experts then add whole vectors.
    padding = ((0, num_blocks * block - num_tokens), (0, 0))
    ids = jnp.pad(expert_ids, padding, constant_values=num_experts)
    ids = ids.reshape(num_blocks, block, top_k).transpose(0, 2, 1)
    chosen = ids[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[:, None]  # [nb, K, G, C]
    per_token = jnp.sum(chosen, axis=1, dtype=jnp.int32)  # [nb, G, C]
    counts = jnp.sum(per_token, axis=2)
    before = jnp.concatenate([jnp.zeros((1, num_experts), jnp.int32), jnp.cumsum(counts, axis=0)])
    bounds = before + jnp.cumsum(before[-1]) - before[-1]

    first = bounds[:-1] // GRANULE * GRANULE
    last = -(-bounds[1:] // GRANULE) * GRANULE
    length = jnp.where(counts > 0, last - first, 0)
    offset = jnp.cumsum(length, axis=1) - length
    shift = jnp.where(counts > 0, offset - first, 0)

    previous = jnp.concatenate([bounds[:1], bounds[:-2]])
    held = (previous <= first) & (first < bounds[:-1])
    fresh = jnp.where(held, first + GRANULE, first)
    fetched = jnp.where(counts > 0, last - fresh, 0)
    place = jnp.cumsum(fetched, axis=1) - fetched
    fetch = jnp.stack([fresh, place, fetched], axis=1) // GRANULE

    # Where the row would be that is first in its window's first granule.
    base = jnp.arange(num_blocks, dtype=jnp.int32)[:, None] % RING
    base = base * buffer_rows(block, top_k, num_experts)
    own = base + place - (fresh - first)
    head = jnp.where(held, jnp.roll(base + place - fresh, 1, axis=0) + first, own)

    # Slots of the same expert that come earlier in the block: of earlier tokens, then of this one.
    # A TPU multiplies these in bf16, which holds a token's counts exactly, and sums in fp32.
    earlier = jnp.triu(jnp.ones((block, block), jnp.float32), k=1)
    rank = jnp.einsum("bgi,ij->bgj", per_token.astype(jnp.float32), earlier).astype(jnp.int32)
    same = (ids[:, :, None] == ids[:, None]) & jnp.tri(top_k, k=-1, dtype=bool)[..., None]
    rank_in_token = jnp.sum(same, axis=2, dtype=jnp.int32)  # [nb, K, C]

    def of_slot(table):
        """table [nb, G, C or 1] at each slot's expert: [nb, K, C]; 0 for padding."""
        return jnp.sum(jnp.where(chosen, table[:, None], 0), axis=2, dtype=jnp.int32)

    def by_slot(table):
        table = jnp.where(ids < num_experts, table, 0)
        return table.transpose(0, 2, 1).reshape(-1, top_k)

    # Two numbers a look-up: all are below 2^15 (`check_block`), and a sum has one term.
    def pack(low, high):
        return low | high << 16

    def unpack(word):
        return word & 0xFFFF, word >> 16

    slot = pack(rank + (bounds[:-1] - first)[..., None], offset[..., None])
    in_window, offset = unpack(of_slot(slot))
    own, head = unpack(of_slot(pack(own + GRANULE, head)[..., None]))
    in_window += rank_in_token
    ring = in_window + jnp.where(in_window < GRANULE, head, own - GRANULE)
    return Windows(bounds, shift, by_slot(in_window + offset), by_slot(ring), fetch)
