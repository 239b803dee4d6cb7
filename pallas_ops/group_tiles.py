"""Which row tile of which group a grid step computes: the metadata of the grouped matmuls.

Rows [0, R) are cut into fixed tiles of tile_m rows; group g owns rows [bounds[g], bounds[g+1]). A
step is a pair (group, tile) that share rows, in row order, so steps of one tile are neighbours and
so are steps of one group. Invariants:

    bounds[0] = 0,  bounds[G] = sum(group_sizes)
    sum over groups of steps <= num_tiles + G - 1   (each boundary inside a tile adds one step)

The grid is that static bound; the steps past `num_steps` repeat the last pair and do nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class GroupTiles(NamedTuple):
    """Scalar-prefetch operands of a grouped matmul; all int32."""

    group: jax.Array
    """[max_steps] group of each step."""
    tile: jax.Array
    """[max_steps] row tile of each step."""
    bounds: jax.Array
    """[G + 1] first row of each group, and the end of the last."""
    num_steps: jax.Array
    """[1] live steps."""


def group_tiles(
    group_sizes: jax.Array, num_rows: int, tile_m: int, *, visit_empty: bool
) -> GroupTiles:
    """Builds the metadata from group_sizes int32 [G], for num_rows >= 1.

    `visit_empty` gives every empty group one step (a weight gradient must be zeroed there); without
    it an empty group has none. Rows past the sum belong to no group: a caller who must write them
    appends a group.
    """
    num_groups = group_sizes.shape[0]
    num_tiles = -(-num_rows // tile_m)
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    starts = ends - group_sizes
    first_tile = jnp.minimum(starts // tile_m, num_tiles - 1)
    steps = jnp.where(
        group_sizes > 0, (ends - 1) // tile_m - starts // tile_m + 1, int(visit_empty)
    )
    step_ends = jnp.cumsum(steps, dtype=jnp.int32)
    num_steps = step_ends[-1]
    step = jnp.minimum(jnp.arange(num_tiles + num_groups - 1, dtype=jnp.int32), num_steps - 1)
    # The group of a step is the number of groups that end before it: compare and sum, no search.
    group = jnp.sum(step[:, None] >= step_ends[None, :], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, num_groups - 1)
    tile = first_tile[group] + step - (step_ends - steps)[group]
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    return GroupTiles(group, jnp.clip(tile, 0, num_tiles - 1), bounds, num_steps[None])
