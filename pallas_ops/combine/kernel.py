"""combine and its gradient in JAX: as XLA gathers, one choice k at a time, so that no [T, K, D]
intermediate exists; and as Pallas kernels that move blocks of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_ops.combine import kernel_backward
from pallas_ops.combine.kernel_reduce import reduce_rows
from pallas_ops.permute.kernel import take_rows


def combine(
    rows: jax.Array,
    weights: jax.Array,
    row_of_slot: jax.Array,
    slot_of_row: jax.Array,
    *,
    interpret: bool,
) -> tuple[jax.Array]:
    """rows [R, D], weights [T, K] -> [T, D]: fp32 products and sum, rounded once."""
    weights = weights.astype(jnp.float32)
    total = jnp.zeros((weights.shape[0], rows.shape[1]), jnp.float32)
    for k in range(weights.shape[1]):
        total += weights[:, k, None] * take_rows(rows, row_of_slot[:, k]).astype(jnp.float32)
    return (total.astype(rows.dtype),)


def combine_backward(
    dout: jax.Array,
    rows: jax.Array,
    weights: jax.Array,
    row_of_slot: jax.Array,
    slot_of_row: jax.Array,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """dout [T, D] -> drows [R, D] = w * dout, an fp32 product rounded once, and dweights [T, K] in
    fp32."""
    num_choices = weights.shape[1]
    wide = dout.astype(jnp.float32)
    weight_of_row = take_rows(weights.astype(jnp.float32).reshape(-1), slot_of_row)
    # Gathered before it is widened: [R, D] in fp32 would be the largest tensor of the layer.
    dout_of_row = take_rows(dout, slot_of_row // num_choices)
    drows = weight_of_row[:, None] * dout_of_row.astype(jnp.float32)
    dweights = [
        jnp.sum(wide * take_rows(rows, row_of_slot[:, k]).astype(jnp.float32), axis=1)
        for k in range(num_choices)
    ]
    return drows.astype(rows.dtype), jnp.stack(dweights, axis=1).astype(weights.dtype)


def combine_windows(
    rows: jax.Array,
    weights: jax.Array,
    bounds: jax.Array,
    shift: jax.Array,
    position: jax.Array,
    ring: jax.Array,
    fetch: jax.Array,
    *,
    interpret: bool,
) -> tuple[jax.Array]:
    """`combine` by window tables: rows [R, D], weights [T, K] -> [T, D]."""
    num_tokens = weights.shape[0]
    out = reduce_rows(rows, weights, ring, fetch, num_tokens=num_tokens, interpret=interpret)
    return (out,)


def combine_backward_windows(
    dout: jax.Array,
    rows: jax.Array,
    weights: jax.Array,
    bounds: jax.Array,
    shift: jax.Array,
    position: jax.Array,
    ring: jax.Array,
    fetch: jax.Array,
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """`combine_backward` by window tables: dout [T, D] -> drows [R, D], dweights [T, K]."""
    return kernel_backward.combine_backward_windows(
        dout, rows, weights, bounds, shift, position, interpret=interpret
    )
