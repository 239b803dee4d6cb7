"""gelu_gate: tanh-GELU of the gate half times the up half. Plain torch on every device.

Elementwise work needs no kernel of its own: XLA fuses it, and between the experts' products
`expert_mlp` does. What must be chosen by hand is what is kept for backward (`h` alone) and that
the two halves' gradients meet in one concatenation rather than in two paddings and a sum.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def split_gate_up(h: Tensor) -> tuple[Tensor, Tensor]:
    """Halves of the last dimension: [..., 2F] -> gate [..., F], up [..., F], views of `h`.

    The backward of `torch.split` is one concatenation and puts zeros where a half has no gradient;
    that of two slices is two paddings and a sum.

    Raises:
        ValueError: an odd last dimension, or none of it.
    """
    if h.ndim == 0 or h.shape[-1] % 2 or not h.shape[-1]:
        raise ValueError(
            f"h has shape {list(h.shape)}; its last dimension must be even, and not 0: gate "
            "beside up"
        )
    gate, up = h.split(h.shape[-1] // 2, dim=-1)
    return gate, up


def gelu_gate(h: Tensor) -> Tensor:
    """gelu_tanh(h[..., :F]) * h[..., F:] for h [..., 2F] -> [..., F] of h.dtype.

    Computed in fp32 at least and rounded once, forward and backward; differentiable any number of
    times; keeps only `h`.

    Raises:
        ValueError: an odd last dimension, or none of it, or an integer dtype.
    """
    split_gate_up(h)
    if not h.is_floating_point():
        raise ValueError(f"gelu_gate: h is {h.dtype}; convert it to a floating dtype")
    return _GeluGate.apply(h)


def _wide(*tensors: Tensor) -> list[Tensor]:
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def gelu_gate_value(h: Tensor) -> Tensor:
    """`gelu_gate` without what it checks and keeps."""
    gate, up = _wide(*split_gate_up(h))
    return (F.gelu(gate, approximate="tanh") * up).to(h.dtype)


def gelu_gate_gradient(h: Tensor, dout: Tensor) -> Tensor:
    """Gradient of h [..., 2F] for dout [..., F], of h.dtype; differentiable."""
    # All wide before they meet: mixed operands cost eager PyTorch a copy each time.
    gate, up, dout = _wide(*split_gate_up(h), dout)
    dgate = torch.ops.aten.gelu_backward(dout * up, gate, approximate="tanh")
    dup = dout * F.gelu(gate, approximate="tanh")
    return torch.cat([dgate.to(h.dtype), dup.to(h.dtype)], dim=-1)


class _GeluGate(torch.autograd.Function):
    @staticmethod
    def forward(h):
        return gelu_gate_value(h)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dout):
        (h,) = ctx.saved_tensors
        return gelu_gate_gradient(h, dout)
