"""Copies of scales: the same values and gradients as one scale, and sums kept apart."""

import pytest
import torch

from torch_gemma4.execution import keep_layout
from torch_gemma4.norm import rms_norms
from torch_gemma4.scales import copies, gather_copies, spread

EPS = 1e-6


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_norms_with_copies_are_norms_with_their_scale(num_shards):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    scales = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    douts = torch.randn(2, 4, 3, 5, dtype=torch.float64)
    results = []
    for given in (scales, [copies(scale, num_shards, keep_layout) for scale in scales]):
        out = torch.stack(rms_norms(x, given, EPS))
        results.append((out, *torch.autograd.grad(out, (x, *scales), douts)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_gradients_of_copies_stay_apart_until_summed():
    scale = torch.ones(3, 5, dtype=torch.float64, requires_grad=True)
    x = torch.randn(6, 2, 5, dtype=torch.float64)
    (by_spread,) = torch.autograd.grad((x * spread(scale, x)).sum(), scale)
    expected = torch.stack([x[2 * i : 2 * i + 2].sum((0, 1)) for i in range(3)])
    torch.testing.assert_close(by_spread, expected)
    torch.testing.assert_close(gather_copies(x, scale), expected)
    torch.testing.assert_close(gather_copies(x, scale[0]), x.sum((0, 1)))


def test_copies_state_where_they_lie():
    seen = []

    def note(tensor, role):
        seen.append((tuple(tensor.shape), role))
        return tensor

    stacked = torch.randn(2, 3, 5)
    found = copies(stacked, 4, note)
    assert seen == [((2, 3, 4, 5), "copies")]
    assert all(torch.equal(found[:, :, i], stacked) for i in range(4))


def test_gradcheck():
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, scale: rms_norms(x, (scale, None), EPS), (x, scale))
