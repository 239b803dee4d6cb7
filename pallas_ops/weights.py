"""How kernels get whole weights on a mesh."""

from __future__ import annotations

import jax


def gathered(
    weight: jax.Array, dtype: str | jax.numpy.dtype, weight_axis: str, weight_dim: int | None
) -> jax.Array:
    """Inside shard_map: all of a weight of which this is a device's shard, cast before it is sent.
    The compiler makes one gather of equal ones."""
    weight = weight.astype(dtype)
    if weight_dim is None:
        return weight
    return jax.lax.all_gather(weight, weight_axis, axis=weight_dim, tiled=True)
