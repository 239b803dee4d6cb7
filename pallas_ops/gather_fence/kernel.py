"""The fence itself: a barrier between gathered weights and a value, and no arithmetic at all."""

from __future__ import annotations

import jax

from pallas_ops.weights import gathered


def gather_fence_sharded(
    x: jax.Array,
    *weights: jax.Array,
    dtype: str,
    weight_axis: str,
    weight_dim: int,
    interpret: bool,
) -> tuple[jax.Array]:
    """Inside shard_map. x is this device's rows; weights its shards, [E, ., .] or the halves
    [2, E, ., .]. They are cast and gathered exactly as `gmm` and `split_gmm` do, so that the
    compiler sees one gather where there are two."""
    del interpret
    whole = [
        gathered(part, dtype, weight_axis, weight_dim)
        for weight in weights
        for part in (weight if weight.ndim == 4 else (weight,))
    ]
    x, *_ = jax.lax.optimization_barrier((x, *whole))
    return (x,)
