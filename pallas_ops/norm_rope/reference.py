"""norm_rope and its gradient in plain torch."""

import torch
from torch import Tensor


def norm_rope(
    x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, *, eps: float
) -> Tensor:
    """x [B, S, N, H] -> the same shape and dtype; see `pallas_ops.norm_rope.op.norm_rope`."""
    normed, _ = _normed(x, eps)
    if weight is not None:
        normed = normed * weight.to(normed.dtype)
    return _turn(normed, cos, sin, 1).to(x.dtype)


def norm_rope_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    eps: float,
    num_shards: int,
) -> tuple[Tensor, Tensor]:
    """(dx like x, dweight [num_shards, H], the sum over each shard of B)."""
    normed, inverse = _normed(x, eps)
    grad = _turn(dout.to(normed.dtype), cos, sin, -1)
    dweight = (grad * normed).unflatten(0, (num_shards, -1)).sum((1, 2, 3))
    if weight is not None:
        grad = grad * weight.to(grad.dtype)
    along = (grad * normed).mean(-1, keepdim=True)
    return (inverse * (grad - normed * along)).to(x.dtype), dweight


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * inverse, inverse


def _turn(x: Tensor, cos: Tensor | None, sin: Tensor | None, direction: int) -> Tensor:
    """Rotates the halves of the last dimension, or back with direction -1."""
    if cos is None:
        return x
    first, second = x.chunk(2, dim=-1)
    sin = direction * sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
