"""Weighted sum of a token's rows in plain torch, and its gradients, one choice k at a time."""

import torch
from torch import Tensor

from pallas_ops.permute.reference import global_index


def combine(rows: Tensor, weights: Tensor, row_of_slot: Tensor, *, num_shards: int) -> Tensor:
    """[R, D], [T, K] -> [T, D]: sum over k of weights[t, k] * rows[row_of_slot[t, k]]."""
    index = global_index(row_of_slot, rows.shape[0], num_shards)
    dtype = _accumulator(rows, weights)
    total = rows.new_zeros(weights.shape[0], rows.shape[1], dtype=dtype)
    for choice, weight in zip(index.unbind(1), weights.to(dtype).unbind(1), strict=True):
        total.addcmul_(rows.index_select(0, choice).to(dtype), weight[:, None])
    return total.to(rows.dtype)


def combine_backward(
    dout: Tensor, rows: Tensor, weights: Tensor, row_of_slot: Tensor, *, num_shards: int
) -> tuple[Tensor, Tensor]:
    """Gradients of `combine`: drows[r] = w[t, k] * dout[t], dw[t, k] = <dout[t], rows[r]>."""
    index = global_index(row_of_slot, rows.shape[0], num_shards)
    dtype = _accumulator(rows, weights)
    wide_dout = dout.to(dtype)
    drows, dweights = torch.empty_like(rows), torch.empty_like(weights)
    for k, choice in enumerate(index.unbind(1)):
        drows[choice] = (wide_dout * weights[:, k, None].to(dtype)).to(rows.dtype)
        chosen = rows.index_select(0, choice).to(dtype)
        dweights[:, k] = chosen.mul_(wide_dout).sum(1)
    return drows, dweights


def _accumulator(rows: Tensor, weights: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(rows.dtype, weights.dtype), torch.float32)
