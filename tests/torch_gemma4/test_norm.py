from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_gemma4 import Execution, Gemma4ForCausalLM, Precision, init_parameters
from torch_gemma4.norm import rms_norm, rms_norms
from torch_gemma4.presets import micro

EPS = 1e-6


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def half_ulp(value: torch.Tensor) -> torch.Tensor:
    """Half the distance of bfloat16 numbers (8 significant bits) near float64 `value`."""
    _, exponent = torch.frexp(value)
    return torch.ldexp(torch.ones_like(value), exponent - 9)


def test_bfloat16_output_is_within_half_an_ulp() -> None:
    x = (torch.randn(512, 96) * torch.logspace(-2, 2, 512)[:, None]).bfloat16()
    weight = torch.randn(96)
    expected = exact(x, weight)
    error = (rms_norm(x, weight, EPS).double() - expected).abs() / half_ulp(expected)
    assert error.max() <= 1 + 1e-3  # float32's own error decides near ties
    twice_rounded = rms_norm(x, None, EPS) * weight.bfloat16()
    assert ((twice_rounded.double() - expected).abs() / half_ulp(expected)).max() > 1.5


def test_scale_gradient_is_a_float32_sum() -> None:
    x, grad = torch.randn(4096, 8).bfloat16(), torch.randn(4096, 8).bfloat16()
    weight = torch.ones(8, requires_grad=True)
    rms_norm(x, weight, EPS).backward(grad)
    expected = (exact(x, torch.ones(8)) * grad.double()).sum(0)
    assert weight.grad.dtype == torch.float32
    assert (weight.grad - expected).abs().max() < 1e-4


def test_several_norms_of_one_tensor_are_the_single_ones() -> None:
    x = torch.randn(2, 3, 16).bfloat16()
    weights = (torch.randn(16), None, torch.randn(16))
    outputs = rms_norms(x, weights, EPS, (torch.bfloat16, torch.bfloat16, torch.float32))
    for output, weight in zip(outputs[:2], weights, strict=False):
        assert torch.equal(output, rms_norm(x, weight, EPS))
    assert outputs[2].dtype == torch.float32
    assert torch.equal(outputs[2], rms_norm(x.float(), weights[2], EPS))


def test_gradcheck() -> None:
    double = {"dtype": torch.float64, "requires_grad": True}
    x, first, second = torch.randn(2, 3, 5, **double), *torch.randn(2, 5, **double).unbind()
    torch.autograd.gradcheck(
        lambda *a: rms_norms(a[0], (a[1], None, a[2]), 1e-2), (x, first, second)
    )
    # An output nobody reads: its gradient is absent, not a tensor of zeros.
    torch.autograd.gradcheck(lambda *a: rms_norms(a[0], (a[1], a[2]), 1e-2)[0], (x, first, second))
    torch.autograd.gradcheck(lambda x: rms_norm(x, None, 1e-2), (x,))


def test_differentiating_twice_is_refused() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(rms_norm(x, None, 1e-2).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def test_a_forward_computes_one_rsqrt_a_normed_tensor() -> None:
    """Nine tensors are normed in a layer: x, q, k, v, attention's output, the residual (thrice, for
    the dense MLP, the experts and the router), both branches' outputs and their sum. Global layers
    norm the key projection once for k and v. The final norm is one more."""
    model = Gemma4ForCausalLM(micro(), Execution(precision=Precision.uniform(torch.float32)))
    init_parameters(model)
    with CountOps() as mode:
        model(torch.zeros(1, 8, dtype=torch.int32))
    layers = [layer.k_eq_v for layer in micro().layers]
    assert mode.counts["aten::rsqrt"] == sum(8 if shared else 9 for shared in layers) + 1
