"""Transposed grouped product in plain torch: what the kernel must equal, and the CPU kernel."""

import torch
from torch import Tensor

from pallas_ops import recycling
from pallas_ops.gmm.reference import group_rows


def tgmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    groups: slice,
    out_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> Tensor:
    """[R, K], [R, N] -> [groups, K, N]; see `pallas_ops.tgmm.op.tgmm`."""
    shards, _ = group_rows(group_sizes, lhs.shape[0])
    shards = [shard[groups] for shard in shards]
    if len(shards) == 1:
        return _one_shard(lhs, rhs, shards[0], out_dtype)
    if lhs.dtype == torch.float64:  # which no mesh has: gradcheck of shards must not lose digits
        reduce_dtype = torch.float64
    total = sum(_one_shard(lhs, rhs, shard, reduce_dtype) for shard in shards)
    return total.to(out_dtype)


def _one_shard(lhs: Tensor, rhs: Tensor, groups: list[slice], out_dtype: torch.dtype) -> Tensor:
    out = recycling.empty((len(groups), lhs.shape[1], rhs.shape[1]), out_dtype)
    # mm rounds once, to the dtype of its operands: a wider result needs wider operands.
    compute_dtype = torch.promote_types(lhs.dtype, out_dtype)
    for product, rows in zip(out, groups, strict=True):
        if rows.start == rows.stop:
            product.zero_()
        elif compute_dtype == out_dtype:
            left, right = lhs[rows].to(compute_dtype), rhs[rows].to(compute_dtype)
            torch.mm(left.t(), right, out=product)
        else:
            product.copy_(torch.mm(lhs[rows].t(), rhs[rows]))
    return out
