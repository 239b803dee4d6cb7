"""The steps of the transposed grouped matmul: which rows of which group each one multiplies.

A group's steps begin at its first row, rounded down to the rows that memory is addressed by, and
take tile_m rows each, so only its last step is short. An empty group has one step of no rows. Steps
are in row order, those of a group beside each other.

While a group is multiplied, the result of the one before leaves for HBM in pieces: `num_written`
spreads them evenly over the group's steps, so that they do not hold up the rows of the next step.
Where there are several, the last one sends none: what it sent would keep the next group waiting for
its buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_ops.chips import V6E


class Steps(NamedTuple):
    """Scalar-prefetch operands, all int32 [max_steps] but the last."""

    group: jax.Array
    """The step's group, counted from the first one asked for; past the last step their number."""
    row: jax.Array
    """First row of the step, a multiple of the row group."""
    skip: jax.Array
    """Rows at the front of the step that belong to an earlier group, fewer than the row group."""
    num_rows: jax.Array
    """Rows of the step, those to skip included; 0 for an empty group."""
    num_written: jax.Array
    """Pieces of the group before that are on their way when the step's product begins."""
    num_steps: jax.Array
    """[1] live steps."""


def group_steps(
    group_sizes: jax.Array,
    num_rows: int,
    *,
    tile_m: int,
    num_pieces: int,
    group_offset: int,
    num_groups: int,
) -> Steps:
    """Steps of the groups [group_offset, group_offset + num_groups) of int32 group_sizes, which are
    those of all groups and sum to num_rows at most."""
    own = slice(group_offset, group_offset + num_groups)
    sizes, ends = group_sizes[own], jnp.cumsum(group_sizes, dtype=jnp.int32)[own]
    row = (ends - sizes) // V6E.row_group * V6E.row_group
    skip = jnp.where(sizes > 0, ends - sizes - row, 0)
    length = skip + sizes
    num_steps = jnp.maximum(-(-length // tile_m), 1)
    step_ends = jnp.cumsum(num_steps, dtype=jnp.int32)
    # Each group adds a short step to the whole ones, and its skipped rows are fewer than a tile's;
    # two more, past the end, are there to be looked at.
    max_steps = num_rows // tile_m + 2 * num_groups + 2
    step = jnp.arange(max_steps, dtype=jnp.int32)
    # The group of a step is the number of groups that end before it: compare and sum, no search.
    group = jnp.sum(step[:, None] >= step_ends[None, :], axis=1, dtype=jnp.int32)
    known = jnp.minimum(group, num_groups - 1)
    nth = step - (step_ends - num_steps)[known]
    return Steps(
        group=group,
        row=row[known] + nth * tile_m,
        skip=jnp.where(nth == 0, skip[known], 0),
        num_rows=jnp.clip(length[known] - nth * tile_m, 0, tile_m),
        num_written=jnp.minimum(
            -(-(nth + 1) * num_pieces // jnp.maximum(num_steps[known] - 1, 1)), num_pieces
        ),
        num_steps=step_ends[-1:],
    )
