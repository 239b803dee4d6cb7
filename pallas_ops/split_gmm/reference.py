"""The split layout in plain torch: a reshape, and the products of the whole."""

import torch
from torch import Tensor

from pallas_ops.gmm import reference as gmm
from pallas_ops.tgmm import reference as tgmm


def split_experts(weight: Tensor) -> Tensor:
    """[G, A, B] -> [2, G, A/2, B], the same values in the same order: half h holds the matrices of
    groups [h G/2, (h+1) G/2), each as two consecutive entries.

    A checkpoint of either layout converts to the other, bit for bit, weights and optimizer moments
    alike; dimension 1 is as long as G, so a mesh that divides G divides it.

    Raises ValueError for an odd G or A.
    """
    num_groups, size = weight.shape[:2]
    if weight.ndim != 3 or num_groups % 2 or size % 2:
        raise ValueError(
            f"split_experts: weight has shape {list(weight.shape)}; expected [G, A, B] with even G "
            "and A"
        )
    return weight.reshape(2, num_groups, size // 2, weight.shape[2])


def join_experts(weight: Tensor) -> Tensor:
    """Inverse of `split_experts`: [2, G, A/2, B] -> [G, A, B]. Raises ValueError for another
    shape."""
    if weight.ndim != 4 or weight.shape[0] != 2 or weight.shape[1] % 2:
        raise ValueError(
            f"join_experts: weight has shape {list(weight.shape)}; expected [2, G, A/2, B] with "
            "even G"
        )
    return weight.reshape(weight.shape[1], -1, weight.shape[3])


def split_gmm(lhs: Tensor, rhs: Tensor, group_sizes: Tensor, *, transpose_rhs: bool) -> Tensor:
    """See `pallas_ops.split_gmm.op.split_gmm`."""
    return gmm.gmm(lhs, join_experts(rhs), group_sizes, transpose_rhs=transpose_rhs)


def split_tgmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    out_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> Tensor:
    """See `pallas_ops.split_gmm.op.split_tgmm`."""
    out = tgmm.tgmm(
        lhs,
        rhs,
        group_sizes,
        groups=slice(None),
        out_dtype=out_dtype,
        reduce_dtype=reduce_dtype,
    )
    return split_experts(out)
