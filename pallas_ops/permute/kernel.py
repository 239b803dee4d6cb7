"""permute and its transpose in JAX: as XLA gathers of whole rows (both directions gather, none
scatters), and as Pallas kernels that move blocks of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_ops.combine.kernel_reduce import reduce_rows
from pallas_ops.permute.kernel_expand import expand_rows


def permute(
    x: jax.Array, row_of_slot: jax.Array, slot_of_row: jax.Array, *, interpret: bool
) -> tuple[jax.Array]:
    """x [T, D] -> [R, D]: row r is token slot_of_row[r] // K."""
    return (take_rows(x, slot_of_row // row_of_slot.shape[1]),)


def unpermute(
    rows: jax.Array, row_of_slot: jax.Array, slot_of_row: jax.Array, *, interpret: bool
) -> tuple[jax.Array]:
    """rows [R, D] -> [T, D]: the sum of a token's K rows, in fp32, rounded once."""
    total = jnp.zeros((row_of_slot.shape[0], rows.shape[1]), jnp.float32)
    for k in range(row_of_slot.shape[1]):
        total += take_rows(rows, row_of_slot[:, k]).astype(jnp.float32)
    return (total.astype(rows.dtype),)


def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] for indices known to be in range: no clamping, no fill."""
    return x.at[index].get(mode="promise_in_bounds")


def permute_windows(
    x: jax.Array,
    bounds: jax.Array,
    shift: jax.Array,
    position: jax.Array,
    ring: jax.Array,
    fetch: jax.Array,
    *,
    interpret: bool,
) -> tuple[jax.Array]:
    """`permute` by window tables: x [T, D] -> [R, D]."""
    return (expand_rows(x, bounds, shift, position, interpret=interpret),)


def unpermute_windows(
    rows: jax.Array,
    bounds: jax.Array,
    shift: jax.Array,
    position: jax.Array,
    ring: jax.Array,
    fetch: jax.Array,
    *,
    interpret: bool,
) -> tuple[jax.Array]:
    """`unpermute` by window tables: rows [R, D] -> [T, D]."""
    num_tokens = rows.shape[0] // ring.shape[1]
    out = reduce_rows(rows, None, ring, fetch, num_tokens=num_tokens, interpret=interpret)
    return (out,)
