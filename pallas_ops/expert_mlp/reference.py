"""Experts in plain torch: what the kernels must equal, and the CPU form."""

from torch import Tensor

from pallas_ops.activation.op import gelu_gate_gradient, gelu_gate_value
from pallas_ops.gmm.reference import gmm


def expert_mlp(
    rows: Tensor, gate_up: Tensor, down: Tensor, group_sizes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """rows [R, D], gate_up [E, 2F, D], down [E, F, D] -> (out [R, D], hidden [R, F], product
    [R, 2F]); see `pallas_ops.expert_mlp.op.expert_mlp`."""
    product = gmm(rows, gate_up, group_sizes, transpose_rhs=True)
    hidden = gelu_gate_value(product)
    return gmm(hidden, down, group_sizes, transpose_rhs=False), hidden, product


def gate_gradient(dout: Tensor, down: Tensor, product: Tensor, group_sizes: Tensor) -> Tensor:
    """Gradient of product [R, 2F] where dout [R, D] is that of `expert_mlp`'s result."""
    return gelu_gate_gradient(product, gmm(dout, down, group_sizes, transpose_rhs=True))
