"""Routing plan in JAX by counting: no comparator sort, no gather on [tokens, experts].

Slots are cut into blocks. For slot i of block b, going to expert e:

    row = first row of e  +  slots of e in blocks before b  +  earlier slots of e in block b

The first two are prefix sums of per-block counts, the last a comparison of the block's ids with
themselves below the diagonal. Every look-up is a compare-and-sum, which XLA fuses into its
reduction, in exact int32. What is left is one scatter of R unique indices for the inverse.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_ops.routing import windows

_BLOCK = 256
"""Slots a block: the comparison inside blocks costs R * _BLOCK, the counts R * E."""


def routing_plan(
    expert_ids: jax.Array, *, num_experts: int, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """expert_ids int32 [T, K] -> group_sizes [E], row_of_slot [T, K], slot_of_row [T * K];
    int32."""
    num_slots = expert_ids.size
    num_blocks = -(-num_slots // _BLOCK)
    # Padding slots belong to no expert.
    ids = jnp.full(num_blocks * _BLOCK, num_experts, jnp.int32)
    ids = ids.at[:num_slots].set(expert_ids.reshape(-1)).reshape(num_blocks, _BLOCK)

    one_hot = ids[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)  # [blocks, _BLOCK, E]
    counts = jnp.sum(one_hot, axis=1, dtype=jnp.int32)
    group_sizes = jnp.sum(counts, axis=0)
    first_row = jnp.cumsum(group_sizes, dtype=jnp.int32) - group_sizes
    first_in_block = first_row + jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts

    earlier = jnp.arange(_BLOCK)[:, None] > jnp.arange(_BLOCK)[None, :]
    same = ids[:, :, None] == ids[:, None, :]
    rank = jnp.sum(same & earlier, axis=2, dtype=jnp.int32)
    row = rank + jnp.sum(jnp.where(one_hot, first_in_block[:, None, :], 0), axis=2)

    row = row.reshape(-1)[:num_slots]
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    slot_of_row = jnp.zeros(num_slots, jnp.int32).at[row].set(slots, unique_indices=True)
    return group_sizes, row.reshape(expert_ids.shape), slot_of_row


def routing_plan_sharded(
    expert_ids: jax.Array, *, num_experts: int, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inside shard_map: the plan of this device's tokens; group_sizes is its row [1, E] of [n,
    E]."""
    sizes, rows, slots = routing_plan(expert_ids, num_experts=num_experts, interpret=interpret)
    return sizes[None], rows, slots


def window_tables(
    expert_ids: jax.Array, *, num_experts: int, block: int, interpret: bool
) -> tuple[jax.Array, ...]:
    """The tables of `windows.routing_windows`, on one device or inside shard_map."""
    return tuple(windows.routing_windows(expert_ids, num_experts=num_experts, block=block))
