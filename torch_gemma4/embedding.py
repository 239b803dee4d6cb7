"""The token embedding, looked up from the compute-dtype copy of its table."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_gemma4.execution import Constrain, keep_layout, wide
from torch_gemma4.linear import unset


class _LookUp(torch.autograd.Function):
    """The gradient is for `weight`, whose value in the compute dtype `table` is. It is summed in
    float32: a frequent token's row adds up thousands of terms."""

    @staticmethod
    def forward(ctx, weight, table, ids, factor, constrain):
        ctx.save_for_backward(ids)
        ctx.constrain = constrain
        ctx.factor, ctx.num_rows, ctx.weight_dtype = factor, weight.shape[0], weight.dtype
        return (F.embedding(ids, table).to(wide(table.dtype)) * factor).to(table.dtype)

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        grad = grad.to(wide(grad.dtype)) * ctx.factor
        # -1: every row learns. (Hugging Face drops the look-up gradient of row pad_token_id.)
        grad = torch.ops.aten.embedding_dense_backward(grad, ids, ctx.num_rows, -1, False)
        # Reduced by itself: else XLA scatters into the head's gradient, which it gathers for that.
        grad = ctx.constrain(grad, "table_gradient")
        return grad.to(ctx.weight_dtype), None, None, None, None


class Embedding(nn.Module):
    """ids [B, S] and `table` -> sqrt(D) * table[ids] in table's dtype, [B, S, D].

    The factor is applied in float32 to the rounded row: sqrt(2816) is 53.066, and not the 53.0 it
    would be in bfloat16, while one cast copy of the table serves the look-up and the head.
    """

    def __init__(
        self, num_rows: int, dim: int, dtype: torch.dtype, constrain: Constrain = keep_layout
    ) -> None:
        super().__init__()
        self.constrain = constrain
        self.weight = unset(num_rows, dim, dtype=dtype)
        self.factor = dim**0.5

    def forward(self, ids: Tensor, table: Tensor) -> Tensor:
        return _LookUp.apply(self.weight, table, ids, self.factor, self.constrain)
