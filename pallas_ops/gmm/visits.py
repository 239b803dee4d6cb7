"""What each grid step of gmm computes: the metadata of one call.

Rows [0, R) are cut into tiles of tile_m rows, and into segments: the rows before the call's groups,
those of each group, the rows after. A visit is a (segment, tile) pair that shares rows, in row
order, so visits of a tile are neighbours and so are visits of a segment. Invariants:

- every row of a visited tile belongs to exactly one visit of it;
- a tile is left once and for all, and every tile is visited, but for those of rows that keep or
  leave what is in memory (`Rest`): of them only the tile beside the groups is visited;
- there is at least one visit, and at most num_tiles + num_segments - 1.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Rest = Literal["zero", "keep", "leave"]
"""What becomes of rows before or after the groups: zeros, what partial_sum has there, or nothing
that anybody may read, because a later call writes them."""
ZERO, KEEP = -1, -2
"""`Visits.rank` where there is no matrix."""


class Visits(NamedTuple):
    """Scalar-prefetch operands, all int32; [S] has one entry for each visit and some to spare."""

    tile: jax.Array
    """[S] row tile that the visit writes."""
    lhs_tile: jax.Array
    """[S] row tile of lhs: a visit that reads none repeats a neighbour's, so nothing is fetched."""
    kept_tile: jax.Array
    """[S] row tile of partial_sum, likewise."""
    first: jax.Array
    """[S] first own row, counted in the tile."""
    end: jax.Array
    """[S] one past the last own row."""
    rank: jax.Array
    """[S] how many matrices the call has used before this one; ZERO or KEEP for rows of no
    group."""
    order: jax.Array
    """[G] the matrices of rhs in order of use."""
    num_used: jax.Array
    """[1] matrices used: groups with rows."""


def make_visits(
    group_sizes: jax.Array,
    num_rows: int,
    tile_m: int,
    *,
    group_offset: int,
    num_groups: int,
    rest: tuple[Rest, Rest],
) -> tuple[Visits, jax.Array]:
    """Visits and their number, for groups [group_offset, group_offset + num_groups) of group_sizes
    int32 [G_all] and num_rows >= 1.

    `rest` is for the rows before the groups and after them.
    """
    before_groups, after_groups = rest
    num_tiles = -(-num_rows // tile_m)
    before = jnp.sum(group_sizes[:group_offset], dtype=jnp.int32)[None]
    own = group_sizes[group_offset : group_offset + num_groups]
    ends = jnp.concatenate([before, before + jnp.cumsum(own, dtype=jnp.int32)])
    # Sizes beyond the rows, or below zero, are a caller's fault, but must not become addresses
    # outside the arrays: ends ascend within the rows.
    ends = jax.lax.cummax(jnp.clip(ends, 0, num_rows))
    ends = jnp.concatenate([ends, jnp.full(1, num_rows, jnp.int32)])
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    first_tile = starts // tile_m
    last_tile = (ends - 1) // tile_m
    if before_groups != "zero":
        first_tile = jnp.concatenate([last_tile[:1], first_tile[1:]])
    if after_groups != "zero":
        last_tile = jnp.concatenate([last_tile[:-1], first_tile[-1:]])
    count = jnp.where(ends > starts, last_tile - first_tile + 1, 0)
    visit_ends = jnp.cumsum(count, dtype=jnp.int32)

    num_segments = num_groups + 2
    visit = jnp.arange(num_tiles + num_segments - 1, dtype=jnp.int32)
    # The segment of a visit is the number of segments that end before it: compare and sum.
    segment = jnp.sum(visit[:, None] >= visit_ends[None, :], axis=1, dtype=jnp.int32)
    segment = jnp.minimum(segment, num_segments - 1)
    tile = first_tile[segment] + visit - (visit_ends - count)[segment]
    tile = jnp.clip(tile, 0, num_tiles - 1)  # what is to spare
    is_group = (segment > 0) & (segment <= num_groups)
    changes = jnp.concatenate([jnp.ones(1, bool), segment[1:] != segment[:-1]])
    rank = jnp.cumsum(is_group & changes, dtype=jnp.int32) - 1
    keeps = [side == "keep" for side in rest]
    is_kept = (keeps[0] & (segment == 0)) | (keeps[1] & (segment > num_groups))
    used_before = jnp.cumsum((ends > starts)[1:-1], dtype=jnp.int32)
    order = jnp.sum(used_before[None, :] <= jnp.arange(num_groups)[:, None], axis=1)
    visits = Visits(
        tile=tile,
        lhs_tile=_hold(tile, is_group),
        kept_tile=_hold(tile, is_kept),
        first=jnp.maximum(starts[segment] - tile * tile_m, 0),
        end=jnp.minimum(ends[segment] - tile * tile_m, tile_m),
        rank=jnp.where(is_group, rank, jnp.where(is_kept, KEEP, ZERO)),
        order=jnp.minimum(order, num_groups - 1).astype(jnp.int32),
        num_used=used_before[-1:],
    )
    return visits, visit_ends[-1]


def _hold(values: jax.Array, valid: jax.Array) -> jax.Array:
    """Each value where it is valid, else the last valid one, else the first."""
    at = jnp.where(valid, jnp.arange(values.shape[0], dtype=jnp.int32), -1)
    last = jax.lax.cummax(at)
    return values[jnp.where(last < 0, jnp.argmax(valid), last)]
