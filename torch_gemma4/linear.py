"""Matrix products of activations in the compute dtype with parameters in their own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def unset(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter without a value: NaN, so that a forgotten initialisation shows at once."""
    return nn.Parameter(torch.full(shape, torch.nan, dtype=dtype))


class Linear(nn.Module):
    """y = x W^T + b with `weight` [out, in] and optional `bias` [out], cast to the dtype of x at
    use. A weight's gradient is one product in that dtype, then cast to the weight's."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = unset(out_features, in_features, dtype=dtype)
        self.bias = unset(out_features, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)
