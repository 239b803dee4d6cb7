"""Two grouped products in a chain, each with one gathered half of the matrices.

The second half is still on its way while the first is multiplied. Rows of the second half are left
unwritten by the first product and written by the second one, into the same memory; each row is
written once, but for those of the tile that both halves share.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_ops.gmm.kernel import gmm
from pallas_ops.tgmm.kernel import sum_over_mesh, tgmm
from pallas_ops.weights import gathered


def split_gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
    interpret: bool,
) -> tuple[jax.Array]:
    """One device: nothing to gather, one product. rhs [2, G, A/2, B]."""
    matrices = rhs.reshape(rhs.shape[1], -1, rhs.shape[3])
    return gmm(lhs, matrices, group_sizes, transpose_rhs=transpose_rhs, interpret=interpret)


def split_gmm_sharded(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
    weight_axis: str,
    weight_dim: int | None,
    interpret: bool,
) -> tuple[jax.Array]:
    """Inside shard_map. lhs [R/n, K]; rhs this device's shard of [2, G, A/2, B]; group_sizes [1, G]
    of this device's rows."""
    sizes, half_of_groups = group_sizes[0], group_sizes.shape[-1] // 2
    out = None
    for half, rest in enumerate((("zero", "leave"), ("keep", "zero"))):
        part = gathered(rhs[half], lhs.dtype, weight_axis, weight_dim)
        (out,) = gmm(
            lhs,
            part.reshape(half_of_groups, -1, part.shape[-1]),
            sizes,
            out,
            transpose_rhs=transpose_rhs,
            group_offset=half * half_of_groups,
            rest=rest,
            interpret=interpret,
        )
    return (out,)


def split_tgmm(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, out_dtype: str, interpret: bool
) -> tuple[jax.Array]:
    """One device: one product, in the split layout [2, G, A/2, B]."""
    (out,) = tgmm(lhs, rhs, group_sizes, out_dtype=out_dtype, interpret=interpret)
    return (out.reshape(2, out.shape[0], out.shape[1] // 2, out.shape[2]),)


def split_tgmm_sharded(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: str,
    reduce_dtype: str,
    row_axes: tuple[str, ...],
    weight_axis: str,
    weight_dim: int | None,
    interpret: bool,
) -> tuple[jax.Array]:
    """Inside shard_map: the sum over devices of each one's gradient, left sharded as the weight.

    The first half is on its way while the second is multiplied.
    """
    half_of_groups = group_sizes.shape[-1] // 2
    halves = []
    for half in range(2):
        (out,) = tgmm(
            lhs,
            rhs,
            group_sizes[0],
            out_dtype=reduce_dtype,
            group_offset=half * half_of_groups,
            num_groups=half_of_groups,
            interpret=interpret,
        )
        out = out.reshape(2 * half_of_groups, -1, out.shape[-1])
        out = sum_over_mesh(out, row_axes=row_axes, weight_axis=weight_axis, weight_dim=weight_dim)
        halves.append(out.astype(out_dtype))
    return (jnp.stack(halves),)
