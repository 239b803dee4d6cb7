"""A grouped product and its gate in one pass: what the two ops give one after the other."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_xla
from hypothesis import example, given

from pallas_ops import OpSharding, gelu_gate, gmm, gmm_gelu_gate
from pallas_ops.gmm_gelu_gate import kernel
from tests.pallas_ops.simulated import without_races

NAN = float("nan")


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def apart(lhs, rhs, group_sizes, **options):
    return gelu_gate(gmm(lhs, rhs, group_sizes, transpose_rhs=True, **options))


def operands(sizes, num_rows, size_f, size_k, dtype, seed=0):
    """NaN in the rows of no group."""
    draw = torch.Generator().manual_seed(seed)
    lhs = torch.randn(num_rows, size_k, generator=draw)
    rhs = torch.randn(len(sizes), 2 * size_f, size_k, generator=draw) / size_k**0.5
    lhs[sum(sizes) :] = NAN
    return lhs.to(dtype), rhs.to(dtype), int32(sizes)


def results(function, lhs, rhs, sizes, device="cpu"):
    """The gated product without a gradient, then with, then the gradients."""
    lhs, rhs, sizes = (t.detach().to(device) for t in (lhs, rhs, sizes))
    with torch.no_grad():
        alone = function(lhs, rhs, sizes)
    lhs, rhs = lhs.requires_grad_(), rhs.requires_grad_()
    out = function(lhs, rhs, sizes)
    weight = torch.linspace(-1, 1, out.numel(), device=device).reshape(out.shape).to(out.dtype)
    grads = torch.autograd.grad(out, (lhs, rhs), weight)
    if device == "xla":
        torch_xla.sync()
    return [t.detach().cpu() for t in (alone, out, *grads)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(3, 0, 5), (0, 0, 0), (10, 0, 0)], ids=str)
def test_is_the_two_ops_bit_for_bit(sizes, dtype):
    arguments = operands(sizes, 10, 3, 5, dtype)
    for ours, theirs in zip(
        results(gmm_gelu_gate, *arguments), results(apart, *arguments), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_two_shards_of_rows_are_the_two_ops_bit_for_bit():
    shards = OpSharding(mesh=(("fsdp", 2),), row_axes=("fsdp",), weight_dim=None)
    lhs, rhs, _ = operands((5, 0, 4), 12, 3, 5, torch.float32)
    lhs[4:6] = NAN  # of no group in the first shard
    sizes = int32([[1, 3, 0], [0, 2, 1]])
    ours = results(functools.partial(gmm_gelu_gate, sharding=shards), lhs, rhs, sizes)
    for mine, other in zip(
        ours, results(functools.partial(apart, sharding=shards), lhs, rhs, sizes), strict=True
    ):
        assert torch.equal(mine, other)


def test_a_gradient_of_one_operand_and_of_a_product_that_was_not_kept():
    lhs, rhs, sizes = operands((3, 0, 5), 10, 3, 5, torch.float32)
    wanted = results(apart, lhs, rhs, sizes)
    for index, operand in enumerate((lhs, rhs)):
        operand.requires_grad_()
        out = gmm_gelu_gate(lhs, rhs, sizes)
        weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
        weight[8:] = NAN
        (grad,) = torch.autograd.grad(out, operand, weight)
        assert torch.equal(grad, wanted[2 + index])
        out, nothing = torch.ops.pallas_ops.gmm_gelu_gate(lhs, rhs, sizes, False, torch.float32, "")
        assert nothing.shape == (0, 6)
        assert torch.equal(torch.autograd.grad(out, operand, weight)[0], wanted[2 + index])
        operand.requires_grad_(False)


def test_gradients_of_any_order():
    lhs, rhs, sizes = operands((2, 0, 3), 5, 2, 3, torch.float64)
    arguments = (lhs.requires_grad_(), rhs.requires_grad_())

    def function(*arguments):
        return gmm_gelu_gate(*arguments, sizes)

    assert torch.autograd.gradcheck(function, arguments)
    assert torch.autograd.gradgradcheck(function, arguments)


# 256 rows to a tile: whole ones, parts whose rows fill the matrix unit, and others. F of whole row
# groups goes through the one kernel, 40 (and 2F = 80) through gmm and XLA's own pass.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size_f", [48, 40])
@pytest.mark.parametrize("sizes", [(256, 0, 300), (70, 186, 256), (0, 512, 1)], ids=str)
def test_on_xla_tensors(sizes, size_f, dtype):
    arguments = operands(sizes, 600, size_f, 24, dtype)
    ours = results(gmm_gelu_gate, *arguments, device="xla")
    theirs = results(apart, *arguments, device="xla")
    assert torch.equal(ours[0], ours[1])  # a layer's second run is its first
    for mine, other in zip(ours, theirs, strict=True):
        error = torch.finfo(dtype).eps * other.float().abs().max()
        torch.testing.assert_close(mine.float(), other.float(), rtol=0, atol=2 * float(error))
    wide = (t.double() for t in arguments[:2])
    exact = results(gmm_gelu_gate, *wide, arguments[2])
    plain = results(gmm_gelu_gate, *arguments)
    for mine, other, want in zip(ours, plain, exact, strict=True):
        floor = torch.finfo(dtype).eps * want.abs().max()
        assert (mine - want).abs().max() <= 2 * (other - want).abs().max() + floor


@functools.partial(jax.jit, static_argnames="keeps_product")
def interpreted(lhs, rhs, group_sizes, keeps_product):
    return kernel.gmm_gelu_gate(lhs, rhs, group_sizes, keeps_product=keeps_product, interpret=True)


@given(st.lists(st.integers(0, 60), min_size=4, max_size=4), st.booleans())
@example([0, 0, 0, 0], True)
@example([16, 16, 16, 16], False)
def test_whatever_the_sizes(sizes, keeps):
    lhs, rhs, _ = operands(sizes, 240, 16, 8, torch.float32)
    found = interpreted(
        *(lhs.numpy(), rhs.numpy(), jnp.array(sizes, jnp.int32)), keeps_product=keeps
    )
    product = gmm(lhs, rhs, int32(sizes), transpose_rhs=True)
    wanted = (gelu_gate(product), product) if keeps else (gelu_gate(product),)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("sizes", [(10, 23, 9), (32, 0, 16), (0, 0, 7)], ids=str)
def test_without_races(sizes, keeps):
    # In the TPU interpreter: memory begins as NaN, a read past the end is an error.
    lhs, rhs, _ = operands(sizes, 48, 64, 128, torch.float32)
    with without_races() as interpret:
        found = kernel.gmm_gelu_gate(
            *(lhs.numpy(), rhs.numpy(), jnp.array(sizes, jnp.int32)),
            keeps_product=keeps,
            interpret=interpret,
        )
        found = [np.asarray(each) for each in found]
    product = gmm(lhs, rhs, int32(sizes), transpose_rhs=True)
    np.testing.assert_allclose(found[0], gelu_gate(product).numpy(), rtol=0, atol=1e-4)


def test_a_kernel_that_cannot_gate_says_so():
    from pallas_ops.gmm.kernel import gmm as gmm_kernel

    lhs, rhs, sizes = jnp.zeros((16, 8)), jnp.zeros((1, 24, 8)), jnp.array([16])
    with pytest.raises(ValueError, match=r"gmm: a gate of N=24 .*whole 32, or gate afterwards"):
        gmm_kernel(lhs, rhs, sizes, transpose_rhs=True, gated=True, interpret=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rhs": torch.zeros(3, 5, 4)}, r"rhs \[3, 5, 4\]; expected rhs \[G, 2F, 4\]"),
        ({"rhs": torch.zeros(3, 6, 5)}, r"lhs has shape \[8, 4\] and rhs \[3, 6, 5\]"),
        ({"rhs": torch.zeros(6, 4)}, "gmm_gelu_gate: rhs"),
        ({"group_sizes": int32([1, 2])}, "gmm_gelu_gate: group_sizes"),
        ({"lhs": torch.zeros(8, 4, dtype=torch.int32)}, "gmm_gelu_gate: lhs"),
    ],
)
def test_bad_input(change, message):
    given = {"lhs": torch.zeros(8, 4), "rhs": torch.zeros(3, 6, 4), "group_sizes": int32([3, 2, 1])}
    with pytest.raises(ValueError, match=message):
        gmm_gelu_gate(**given | change)
