"""A grouped product and its gate in plain torch: what the kernel must equal, and the CPU form."""

from torch import Tensor

from pallas_ops.activation.op import gelu_gate_value
from pallas_ops.gmm import reference


def gmm_gelu_gate(lhs: Tensor, rhs: Tensor, group_sizes: Tensor) -> tuple[Tensor, Tensor]:
    """[R, K] x [G, 2F, K] -> (gated [R, F], product [R, 2F]); see
    `pallas_ops.gmm_gelu_gate.op.gmm_gelu_gate`."""
    product = reference.gmm(lhs, rhs, group_sizes, transpose_rhs=True)
    return gelu_gate_value(product), product
