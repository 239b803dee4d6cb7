"""Experts with the gate inside their products: what the ops give one after the other."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_xla
from hypothesis import example, given

from pallas_ops import OpSharding, expert_mlp, gelu_gate, gmm
from pallas_ops.activation.op import gelu_gate_gradient
from pallas_ops.expert_mlp import kernel
from tests.pallas_ops.simulated import without_races

NAN = float("nan")


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def apart(rows, gate_up, down, group_sizes, **options):
    product = gmm(rows, gate_up, group_sizes, transpose_rhs=True, **options)
    return gmm(gelu_gate(product), down, group_sizes, **options)


def operands(sizes, num_rows, size_f, size_d, dtype, seed=0):
    """NaN in the rows of no group."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, size_d, generator=draw)
    gate_up = torch.randn(len(sizes), 2 * size_f, size_d, generator=draw) / size_d**0.5
    down = torch.randn(len(sizes), size_f, size_d, generator=draw) / size_f**0.5
    rows[sum(sizes) :] = NAN
    return (*(t.to(dtype) for t in (rows, gate_up, down)), int32(sizes))


def weight_of(out):
    """A gradient of `out` that is none of a plain sum."""
    return torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape).to(out.dtype)


def results(function, *arguments, device="cpu"):
    """The result without a gradient, then with, then the gradients."""
    *floats, sizes = (t.detach().to(device) for t in arguments)
    with torch.no_grad():
        alone = function(*floats, sizes)
    floats = [t.requires_grad_() for t in floats]
    out = function(*floats, sizes)
    grads = torch.autograd.grad(out, floats, weight_of(out))
    if device == "xla":
        torch_xla.sync()
    return [t.detach().cpu() for t in (alone, out, *grads)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(3, 0, 5), (0, 0, 0), (10, 0, 0)], ids=str)
def test_is_the_ops_bit_for_bit(sizes, dtype):
    arguments = operands(sizes, 10, 3, 5, dtype)
    for ours, theirs in zip(
        results(expert_mlp, *arguments), results(apart, *arguments), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_two_shards_of_rows_are_the_ops_bit_for_bit():
    shards = OpSharding(mesh=(("fsdp", 2),), row_axes=("fsdp",), weight_dim=None)
    rows, *weights, _ = operands((5, 0, 4), 12, 3, 5, torch.float32)
    rows[4:6] = NAN  # of no group in the first shard
    arguments = (rows, *weights, int32([[1, 3, 0], [0, 2, 1]]))
    ours = results(functools.partial(expert_mlp, sharding=shards), *arguments)
    theirs = results(functools.partial(apart, sharding=shards), *arguments)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("index", [0, 1, 2], ids=["rows", "gate_up", "down"])
def test_a_gradient_of_one_operand_and_of_products_that_were_not_kept(index):
    *floats, sizes = arguments = operands((3, 0, 5), 10, 3, 5, torch.float32)
    wanted = results(apart, *arguments)[2 + index]
    floats[index].requires_grad_()
    out = expert_mlp(*floats, sizes)
    weight = weight_of(out)
    weight[8:] = NAN
    assert torch.equal(torch.autograd.grad(out, floats[index], weight)[0], wanted)
    out, *nothing = torch.ops.pallas_ops.expert_mlp(*floats, sizes, False, torch.float32, "")
    assert [each.shape for each in nothing] == [(0, 3), (0, 6)]
    assert torch.equal(torch.autograd.grad(out, floats[index], weight)[0], wanted)


def test_gradients_of_any_order():
    *floats, sizes = operands((2, 0, 3), 5, 2, 3, torch.float64)
    arguments = tuple(t.requires_grad_() for t in floats)

    def function(*arguments):
        return expert_mlp(*arguments, sizes)

    assert torch.autograd.gradcheck(function, arguments)
    assert torch.autograd.gradgradcheck(function, arguments)


# 256 rows to a tile: whole ones, parts whose rows fill the matrix unit, and others. F of whole row
# groups goes through the kernels with a gate, 40 through gmm and XLA's own passes.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size_f", [48, 40])
@pytest.mark.parametrize("sizes", [(256, 0, 300), (70, 186, 256), (0, 512, 1)], ids=str)
def test_on_xla_tensors(sizes, size_f, dtype):
    arguments = operands(sizes, 600, size_f, 24, dtype)
    ours = results(expert_mlp, *arguments, device="xla")
    theirs = results(apart, *arguments, device="xla")
    assert torch.equal(ours[0], ours[1])  # a layer's second run is its first
    for mine, other in zip(ours, theirs, strict=True):
        error = torch.finfo(dtype).eps * other.float().abs().max()
        torch.testing.assert_close(mine.float(), other.float(), rtol=0, atol=2 * float(error))
    wide = (t.double() for t in arguments[:3])
    exact = results(expert_mlp, *wide, arguments[3])
    plain = results(expert_mlp, *arguments)
    for mine, other, want in zip(ours, plain, exact, strict=True):
        floor = torch.finfo(dtype).eps * want.abs().max()
        assert (mine - want).abs().max() <= 2 * (other - want).abs().max() + floor


@functools.partial(jax.jit, static_argnames="keeps_product")
def gated(rows, gate_up, sizes, keeps_product):
    return kernel.gmm_gelu_gate(rows, gate_up, sizes, keeps_product=keeps_product, interpret=True)


@jax.jit
def gradient(dout, down, product, sizes):
    return kernel.gmm_gate_gradient(dout, down, product, sizes, interpret=True)


ANY_SIZES = st.lists(st.integers(0, 60), min_size=4, max_size=4)


@given(ANY_SIZES, st.booleans())
@example([0, 0, 0, 0], True)
@example([16, 16, 16, 16], False)
def test_gated_whatever_the_sizes(sizes, keeps):
    rows, gate_up, _, _ = operands(sizes, 240, 16, 8, torch.float32)
    found = gated(rows.numpy(), gate_up.numpy(), jnp.array(sizes, jnp.int32), keeps_product=keeps)
    product = gmm(rows, gate_up, int32(sizes), transpose_rhs=True)
    wanted = (gelu_gate(product), product) if keeps else (gelu_gate(product),)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=1e-5)


def of_a_gradient(sizes, num_rows, size_f, size_d):
    """dout, down and product, NaN in the rows of no group, and the gradient of the product."""
    dout, _, down, _ = operands(sizes, num_rows, size_f, size_d, torch.float32)
    product = 2 * torch.randn(num_rows, 2 * size_f, generator=torch.Generator().manual_seed(1))
    product[sum(sizes) :] = NAN
    dhidden = gmm(dout, down, int32(sizes), transpose_rhs=True)
    wanted = gelu_gate_gradient(product, dhidden)
    wanted[sum(sizes) :] = 0
    return (*(t.numpy() for t in (dout, down, product)), jnp.array(sizes, jnp.int32)), wanted


@given(ANY_SIZES)
@example([0, 0, 0, 0])
@example([16, 16, 16, 16])
def test_gradient_whatever_the_sizes(sizes):
    arguments, wanted = of_a_gradient(sizes, 240, 16, 8)
    (found,) = gradient(*arguments)
    # XLA's tanh is -1 from -7.9 on: what cancels there is lost, 4e-7 times a gate of -5 and dout.
    largest = float(wanted.abs().max())
    np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=3e-6 * largest + 1e-7)


def test_the_gradient_in_two_pieces_of_columns():
    # 1,024 columns and 16 more, of whole tiles and of parts.
    arguments, wanted = of_a_gradient((256, 40, 256), 600, 1040, 8)
    (found,) = gradient(*arguments)
    largest = float(wanted.abs().max())
    np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=3e-6 * largest)


def test_a_gradient_of_a_gradient_on_xla_tensors():
    def grads(function, device):
        *floats, sizes = (t.to(device) for t in operands((30, 0, 50), 80, 32, 24, torch.float32))
        floats = [t.requires_grad_() for t in floats]
        out = function(*floats, sizes)
        first = torch.autograd.grad(out, floats, weight_of(out), create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), floats)
        return [t.detach().cpu() for t in (*first, *second)]

    for ours, theirs in zip(grads(expert_mlp, "xla"), grads(apart, "cpu"), strict=True):
        error = (ours - theirs).abs().max()
        assert error <= 1e-5 * theirs.abs().max()


def test_a_second_backward_pass_finds_what_the_first_did():
    # On TPUs the gradient takes the memory of the product it is of, where that is not needed again.
    *floats, sizes = (t.to("xla") for t in operands((256, 30), 300, 48, 24, torch.float32))
    floats = [t.requires_grad_() for t in floats]
    out = expert_mlp(*floats, sizes)
    runs = []
    for _ in range(2):
        grads = torch.autograd.grad(out, floats, weight_of(out), retain_graph=True)
        torch_xla.sync()
        runs.append([t.cpu() for t in grads])
    assert all(map(torch.equal, *runs))


def test_the_gradient_far_from_zero():
    # tanh is exactly one there, and its slope nothing, whose factor is large.
    arguments, _ = of_a_gradient((200, 56), 256, 16, 8)
    dout, down, product, sizes = arguments
    product = np.where(product > 0, 1e4, -1e4).astype(np.float32)
    (found,) = gradient(dout, down, product, sizes)
    dhidden = gmm(*map(torch.tensor, (dout, down)), int32([200, 56]), transpose_rhs=True)
    wanted = gelu_gate_gradient(torch.tensor(product), dhidden)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("sizes", [(10, 23, 9), (32, 0, 16), (0, 0, 7)], ids=str)
def test_gated_without_races(sizes, keeps):
    # In the TPU interpreter: memory begins as NaN, a read past the end is an error.
    rows, gate_up, _, _ = operands(sizes, 48, 64, 128, torch.float32)
    with without_races() as interpret:
        found = kernel.gmm_gelu_gate(
            *(rows.numpy(), gate_up.numpy(), jnp.array(sizes, jnp.int32)),
            keeps_product=keeps,
            interpret=interpret,
        )
        found = [np.asarray(each) for each in found]
    product = gmm(rows, gate_up, int32(sizes), transpose_rhs=True)
    np.testing.assert_allclose(found[0], gelu_gate(product).numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("sizes", [(10, 23, 9), (32, 0, 16), (0, 0, 7)], ids=str)
def test_gradient_without_races(sizes):
    arguments, wanted = of_a_gradient(sizes, 48, 64, 128)
    with without_races() as interpret:
        (found,) = kernel.gmm_gate_gradient(*arguments, interpret=interpret)
        found = np.asarray(found)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=1e-4)


def test_a_kernel_that_cannot_gate_says_so():
    from pallas_ops.gmm.kernel import gmm as gmm_kernel

    lhs, rhs, sizes = jnp.zeros((16, 8)), jnp.zeros((1, 24, 8)), jnp.array([16])
    options = {"transpose_rhs": True, "interpret": True}
    with pytest.raises(ValueError, match=r"gmm: a gate of 24 col.*whole 32, or gate afterwards"):
        gmm_kernel(lhs, rhs, sizes, gate="value", **options)
    with pytest.raises(ValueError, match=r"gmm: gate='gradient' .* give one of \[16, 48\]"):
        gmm_kernel(lhs, rhs, sizes, gate="gradient", **options)
    with pytest.raises(ValueError, match=r"gmm: a gate of 48 columns with N=24"):
        gmm_kernel(lhs, rhs, sizes, gate="gradient", gated_from=jnp.zeros((16, 48)), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up": torch.zeros(3, 5, 4)}, r"gate_up \[3, 5, 4\] and down .* must be \[R, D\]"),
        ({"gate_up": torch.zeros(3, 6, 5)}, r"rows \[8, 4\], gate_up \[3, 6, 5\]"),
        ({"down": torch.zeros(3, 4, 3)}, r"down \[3, 4, 3\] must be"),
        ({"down": torch.zeros(3, 0, 4), "gate_up": torch.zeros(3, 0, 4)}, "with F >= 1"),
        ({"gate_up": torch.zeros(6, 4)}, "expert_mlp: gate_up"),
        ({"group_sizes": int32([1, 2])}, "expert_mlp: group_sizes"),
        ({"rows": torch.zeros(8, 4, dtype=torch.int32)}, "expert_mlp: rows"),
    ],
)
def test_bad_input(change, message):
    given = {
        "rows": torch.zeros(8, 4),
        "gate_up": torch.zeros(3, 6, 4),
        "down": torch.zeros(3, 3, 4),
        "group_sizes": int32([3, 2, 1]),
    }
    with pytest.raises(ValueError, match=message):
        expert_mlp(**given | change)


def test_weights_that_the_mesh_cannot_split():
    layout = OpSharding((("fsdp", 2),), ("fsdp",), weight_dim=1)
    sizes = int32([[3, 1, 0], [2, 1, 1]])
    with pytest.raises(ValueError, match=r"expert_mlp: dim 1 of down has size 3"):
        expert_mlp(
            torch.zeros(8, 4), torch.zeros(3, 6, 4), torch.zeros(3, 3, 4), sizes, sharding=layout
        )
