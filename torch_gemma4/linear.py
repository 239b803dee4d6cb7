"""Matrix products of activations in the compute dtype with parameters in their own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torch_gemma4.execution import Execution
from torch_gemma4.scales import spread


def unset(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter without a value: NaN, so that a forgotten initialisation shows at once."""
    return nn.Parameter(torch.full(shape, torch.nan, dtype=dtype))


class _MatMul(torch.autograd.Function):
    """x W^T. Keeps the parameter, not its cast and gathered copy, which backward makes again."""

    @staticmethod
    def forward(ctx, x, weight, constrain, reduce):
        ctx.save_for_backward(x, weight)
        ctx.constrain, ctx.reduce = constrain, reduce
        return constrain(F.linear(x, constrain(weight.to(x.dtype), "weight")), "rows")

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        x, grad = ctx.constrain(x, "rows"), ctx.constrain(grad, "rows")
        dx = grad @ ctx.constrain(weight.to(x.dtype), "weight")
        # The partitioner sums over the mesh what this product gives, in the product's dtype. Wider
        # operands cost a TPU nothing: its compiler casts them on the way, and multiplies in bf16.
        dtype = torch.promote_types(x.dtype, ctx.reduce)
        dweight = grad.flatten(0, -2).t().to(dtype) @ x.flatten(0, -2).to(dtype)
        return dx, dweight.to(weight.dtype), None, None


class Linear(nn.Module):
    """y = x W^T + b with `weight` [out, in] and optional `bias` [out], cast to the dtype of x at
    use. A weight's gradient is one product, given and summed over a mesh in the wider of that dtype
    and `execution.precision.reduce`, then cast to the weight's.

    On a mesh the cast weight is stated to be whole ("weight"), and activations and their gradients
    split by tokens ("rows"): else the partitioner, starting from how weights and their gradients
    are stored, splits features instead of tokens and exchanges activations all to all.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        execution: Execution | None = None,
    ) -> None:
        super().__init__()
        execution = execution or Execution()
        self.constrain, self.reduce = execution.constrain, execution.precision.reduce
        self.weight = unset(out_features, in_features, dtype=dtype)
        self.bias = unset(out_features, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = _MatMul.apply(x, self.weight, self.constrain, self.reduce)
        return y if self.bias is None else y + spread(self.bias.to(x.dtype), y)
