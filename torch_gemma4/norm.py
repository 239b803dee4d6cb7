"""RMSNorm in float32 with one rounding, and several norms of one tensor from one rsqrt.

y = x * (mean(x^2) + eps)^(-1/2) * w, with plain w (Gemma 4 has no "1 + w"). Zhang and Sennrich,
"Root Mean Square Layer Normalization", 2019. Statistics, product and scale stay in float32 and are
rounded to the output's dtype once, so y is within half an ulp of the exact value (and float32's
own error); the scale's gradient is a float32 sum that never passes through bfloat16.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torch_gemma4.execution import wide
from torch_gemma4.linear import unset
from torch_gemma4.scales import gather_copies, spread


class _Norms(torch.autograd.Function):
    """One x, several scales. Keeps x as it came and the inverse RMS, one number a row; all outputs'
    gradients meet in float32 and x's is rounded once."""

    @staticmethod
    def forward(ctx, x, eps, dtypes, *weights):
        ctx.set_materialize_grads(False)
        x_wide = x.to(wide(x.dtype))
        inverse = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, inverse, *weights)
        normed = x_wide * inverse
        return tuple(
            (normed if weight is None else normed * spread(weight.to(normed.dtype), x)).to(dtype)
            for weight, dtype in zip(weights, dtypes, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        x, inverse, *weights = ctx.saved_tensors
        normed = x.to(inverse.dtype) * inverse
        grad_normed, grad_weights = None, []
        for grad, weight in zip(grads, weights, strict=True):
            grad_weight = None
            if grad is not None:
                grad = grad.to(normed.dtype)
                if weight is not None:
                    grad_weight = gather_copies(grad * normed, weight).to(weight.dtype)
                    grad = grad * spread(weight.to(normed.dtype), x)
                grad_normed = grad if grad_normed is None else grad_normed + grad
            grad_weights.append(grad_weight)
        if grad_normed is None:
            return None, None, None, *grad_weights
        along = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = inverse * (grad_normed - normed * along)
        return grad_x.to(x.dtype), None, None, *grad_weights


def rms_norms(
    x: Tensor,
    weights: Sequence[Tensor | None],
    eps: float,
    dtypes: Sequence[torch.dtype] | None = None,
) -> tuple[Tensor, ...]:
    """RMSNorms of x [..., D] that differ in scale only, sharing one rsqrt.

    `weights` are [D] each, or [n, D] for n equal shares of x's first dim (see
    `torch_gemma4.scales`), None for a norm without scale; `dtypes` are the outputs' (default: all
    of x's). Differentiable once.
    """
    return _Norms.apply(x, eps, tuple(dtypes or [x.dtype] * len(weights)), *weights)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of x [..., D] with scale `weight` [D] or none, in x's dtype."""
    return rms_norms(x, (weight,), eps)[0]


class RMSNorm(nn.Module):
    """`rms_norm` with its parameter `weight` [dim]."""

    def __init__(self, dim: int, eps: float, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = unset(dim, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
