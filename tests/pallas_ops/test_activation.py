"""gelu_gate and split_gate_up: values, gradients, what is kept and how halves meet."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pallas_ops import gelu_gate, split_gate_up


def plain(h):
    gate, up = h.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def value_and_gradient(function, h, dout):
    h = h.detach().requires_grad_()
    out = function(h)
    return out.detach(), torch.autograd.grad(out, h, dout)[0]


class Calls(TorchDispatchMode):
    """Names of the aten operations run inside."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(2,), (7, 6), (2, 3, 1408)])
def test_equals_plain_torch(shape):
    h = 3 * torch.randn(shape, dtype=torch.float64)
    dout = torch.randn(*shape[:-1], shape[-1] // 2, dtype=torch.float64)
    torch.testing.assert_close(
        value_and_gradient(gelu_gate, h, dout), value_and_gradient(plain, h, dout)
    )


def test_bf16_is_rounded_once():
    h = 3 * torch.randn(64, 128)
    h, dout = h.bfloat16(), torch.randn(64, 64).bfloat16()
    result = value_and_gradient(gelu_gate, h, dout)
    exact = value_and_gradient(plain, h.double(), dout.double())
    for got, want in zip(result, exact, strict=True):
        assert got.dtype == torch.bfloat16
        # Half a unit in the last place; the fp32 noise of 1 + tanh is what remains far below zero.
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=2e-5)


def test_gradients_of_any_order():
    h = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gelu_gate, h)
    assert torch.autograd.gradgradcheck(gelu_gate, h)


def test_keeps_only_its_input():
    h, kept = torch.randn(3, 4).bfloat16().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gelu_gate(h)
    assert [t.data_ptr() for t in kept] == [h.data_ptr()]


@pytest.mark.parametrize("function", [gelu_gate, lambda h: torch.mul(*split_gate_up(h))])
def test_backward_is_one_concatenation(function):
    out = function(torch.randn(3, 4, requires_grad=True))
    with Calls() as calls:
        out.backward(torch.ones(3, 2))
    assert calls.names.count("cat") == 1
    assert not {"constant_pad_nd", "slice_backward", "add", "add_"} & set(calls.names)


@pytest.mark.parametrize("half", [0, 1])
def test_split_survives_a_missing_gradient(half):
    h = torch.randn(3, 4, requires_grad=True)
    split_gate_up(h)[half].sum().backward()
    expected = torch.zeros(3, 2, 2)
    expected[:, half] = 1
    assert torch.equal(h.grad, expected.flatten(1))


@pytest.mark.parametrize("function", [gelu_gate, split_gate_up])
@pytest.mark.parametrize("shape", [(3, 5), (), (3, 0)])
def test_odd_width_is_refused(function, shape):
    with pytest.raises(ValueError, match="dimension must be even, and not 0: gate beside up"):
        function(torch.zeros(shape))


def test_integers_are_refused():
    with pytest.raises(ValueError, match=r"h is torch.int32; convert"):
        gelu_gate(torch.zeros(2, 2, dtype=torch.int32))
