"""A grouped product and its gate in one Pallas call: gmm's kernel with `gated`.

Where a group's whole matrix does not fit VMEM beside its blocks, or F is no whole number of row
groups, the product is gmm's and the gate a pass of XLA's own: the same values.
"""

from __future__ import annotations

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.chips import V6E
from pallas_ops.gmm.kernel import gmm
from pallas_ops.gmm.products import gelu_gate
from pallas_ops.tiling import choose_gmm_tiles
from pallas_ops.weights import gathered


def gmm_gelu_gate(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    keeps_product: bool,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, ...]:
    """One device. lhs [R, K]; rhs [G, 2F, K], gate rows, then up rows; group_sizes int32 [G].
    Returns (gated [R, F], product [R, 2F] if `keeps_product`)."""
    num_groups, size_n, size_k = rhs.shape
    sizes = (lhs.shape[0], size_k, size_n, num_groups, lhs.dtype.itemsize)
    if lhs.shape[0] and size_n % (2 * V6E.row_group) == 0:
        tiles = choose_gmm_tiles(*sizes, keeps=True)
        if tiles.tile_n >= size_n:
            return gmm(
                *(lhs, rhs, group_sizes),
                transpose_rhs=True,
                gated=True,
                tiles=tiles,
                keeps_product=keeps_product,
                interpret=interpret,
            )
    (product,) = gmm(lhs, rhs, group_sizes, transpose_rhs=True, interpret=interpret)
    gated = gelu_gate(product[:, : size_n // 2], product[:, size_n // 2 :])
    return (gated, product) if keeps_product else (gated,)


def gmm_gelu_gate_sharded(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    keeps_product: bool,
    weight_axis: str,
    weight_dim: int | None,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Inside shard_map: this device's rows against all groups, the weight gathered in the rows'
    dtype.

    lhs [R/n, K]; rhs this device's shard; group_sizes [1, G] of this device's rows.
    """
    rhs = gathered(rhs, lhs.dtype, weight_axis, weight_dim)
    return gmm_gelu_gate(lhs, rhs, group_sizes[0], keeps_product=keeps_product, interpret=interpret)
