"""split_gmm against gmm of the joined weight, and its chain of two products at every boundary."""

import functools
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_xla
from hypothesis import example, given

from pallas_ops import OpSharding, gmm, join_experts, split_experts, split_gmm
from pallas_ops.split_gmm import kernel
from pallas_ops.tiling import Tiles
from tests.pallas_ops.processes import on_four_devices
from tests.pallas_ops.simulated import without_races

FP64 = torch.float64


def int32(sizes):
    return torch.tensor(sizes, dtype=torch.int32)


def weights(num_groups, size_k, size_n, transpose_rhs, dtype=FP64):
    shape = (size_n, size_k) if transpose_rhs else (size_k, size_n)
    return torch.randn(num_groups, *shape, dtype=dtype)


def test_layouts_convert_bit_for_bit():
    weight = torch.randn(6, 4, 5)
    split = split_experts(weight)
    assert split.shape == (2, 6, 2, 5)
    assert torch.equal(join_experts(split), weight)
    for group in range(6):  # half h, entry c: group 3 h + c // 2, rows (c % 2) * 2 onwards
        half, first = divmod(2 * group, 6)
        assert torch.equal(split[half, first : first + 2].reshape(4, 5), weight[group])


@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 3, 5), (4, 4)])
def test_layouts_that_do_not_exist(shape):
    with pytest.raises(ValueError, match=r"split_experts: weight has shape .*expected \[G, A, B\]"):
        split_experts(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (2, 3, 4, 5), (2, 4, 4)])
def test_split_layouts_that_do_not_exist(shape):
    with pytest.raises(ValueError, match=r"join_experts: weight has shape .*expected .*even G"):
        join_experts(torch.zeros(shape))


# Sizes of the peer's tests: aligned, boundary unaligned, half of the groups elsewhere.
SIZES = [
    (16, 32, 16, 16, 48, 32),
    (10, 23, 9, 30, 20, 36),
    (7, 0, 25, 0, 9, 14, 33, 8),
    (20, 0, 12, 24),
    (0, 0, 11, 5),
    (11, 5, 0, 0),
    (0, 0, 0, 0),
]


@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_gmm(sizes, transpose_rhs):
    lhs = torch.randn(sum(sizes) + 3, 6, dtype=FP64)
    lhs[sum(sizes) :] = float("nan")
    weight = weights(len(sizes), 6, 4, transpose_rhs)
    dout = torch.randn(len(lhs), 4, dtype=FP64)
    results = []
    for product, rhs in ((gmm, weight), (split_gmm, split_experts(weight))):
        leaves = [lhs.clone().requires_grad_(), rhs.clone().requires_grad_()]
        out = product(*leaves, int32(sizes), transpose_rhs=transpose_rhs)
        dlhs, drhs = torch.autograd.grad(out, leaves, dout)
        results.append((out, dlhs, drhs if product is gmm else join_experts(drhs)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_gradients_of_any_order(transpose_rhs):
    inputs = [torch.randn(6, 4, dtype=FP64), split_experts(weights(2, 4, 2, transpose_rhs))]

    def product(lhs, rhs):
        return split_gmm(lhs, rhs, int32([2, 3]), transpose_rhs=transpose_rhs)

    inputs = [t.requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(product, inputs)
    assert torch.autograd.gradgradcheck(product, inputs)


def test_on_xla_tensors():
    sizes = int32([70, 0, 90, 100])
    lhs, dout = torch.randn(300, 20), torch.randn(300, 12)
    rhs = split_experts(weights(4, 20, 12, True, torch.float32))
    results = []
    for device in ("cpu", "xla"):
        leaves = [t.detach().to(device).requires_grad_() for t in (lhs, rhs)]
        out = split_gmm(*leaves, sizes.to(device), transpose_rhs=True)
        grads = torch.autograd.grad(out, leaves, dout.to(device))
        torch_xla.sync()
        results.append([t.detach().cpu() for t in (out, *grads)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


# 304 rows of which groups may leave some; one compilation for all sizes.
NUM_ROWS, SIZE_K, SIZE_N, NUM_GROUPS = 304, 24, 40, 4


@functools.partial(jax.jit, static_argnums=3)
def chained(lhs, rhs, sizes, transpose_rhs):
    (out,) = kernel.split_gmm_sharded(
        *(lhs, rhs, sizes[None]),
        transpose_rhs=transpose_rhs,
        weight_axis="fsdp",
        weight_dim=None,  # whole already, so that no mesh is needed
        interpret=True,
    )
    return out


@st.composite
def group_sizes(draw):
    end = st.one_of(st.sampled_from([0, 1, 16, 127, 128, 129, 256, 304]), st.integers(0, NUM_ROWS))
    ends = sorted(draw(st.lists(end, min_size=NUM_GROUPS, max_size=NUM_GROUPS)))
    return [end - start for start, end in itertools.pairwise([0, *ends])]


@given(group_sizes(), st.booleans())
@example([0, 0, 100, 204], True)  # boundary at 0
@example([100, 204, 0, 0], True)  # at the end
@example([0, 0, 0, 0], False)
@example([128, 0, 0, 128], False)  # at a tile's edge, between empty groups
@example([100, 3, 100, 3], True)  # both halves in one tile
@example([150, 50, 1, 1], False)
def test_the_chain_writes_every_row(sizes, transpose_rhs):
    # Rows that the first product leaves are NaN in the interpreter until the second writes them.
    draw = np.random.default_rng(0)
    lhs = draw.standard_normal((NUM_ROWS, SIZE_K)).astype(np.float32)
    lhs[sum(sizes) :] = np.nan
    shape = (SIZE_N, SIZE_K) if transpose_rhs else (SIZE_K, SIZE_N)
    weight = draw.standard_normal((NUM_GROUPS, *shape)).astype(np.float32)
    rhs = weight.reshape(2, NUM_GROUPS, shape[0] // 2, shape[1])
    out = np.asarray(chained(lhs, rhs, jnp.array(sizes, jnp.int32), transpose_rhs))
    want = gmm(
        *(torch.tensor(lhs), torch.tensor(weight), int32(sizes)), transpose_rhs=transpose_rhs
    )
    np.testing.assert_allclose(out, want.numpy(), rtol=0, atol=1e-4)
    assert not out[sum(sizes) :].any()


def test_a_range_of_groups_in_two_products():
    # The peer's case: groups 2 to 7 of 8, in two halves, the rows of 0 and 1 not this call's.
    sizes, first, middle = (7, 0, 25, 0, 9, 14, 33, 8), 2, 5
    draw = np.random.default_rng(0)
    lhs = draw.standard_normal((sum(sizes), SIZE_K)).astype(np.float32)
    lhs[: sum(sizes[:first])] = np.nan
    weight = draw.standard_normal((len(sizes), SIZE_K, SIZE_N)).astype(np.float32)
    out = None
    for begin, end, rest in ((first, middle, ("zero", "leave")), (middle, 8, ("keep", "zero"))):
        (out,) = kernel.gmm(
            *(lhs, weight[begin:end], jnp.array(sizes, jnp.int32), out),
            transpose_rhs=False,
            group_offset=begin,
            rest=rest,
            interpret=True,
        )
    want = gmm(*(torch.tensor(lhs), torch.tensor(weight[first:]), int32(sizes)), group_offset=first)
    np.testing.assert_allclose(out, want.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("sizes", [(10, 23, 9, 6), (16, 16, 0, 16), (0, 0, 20, 12)], ids=str)
def test_the_chain_without_races(sizes):
    # In the TPU interpreter, which takes whole tiles alone where an operand is also the result.
    draw = np.random.default_rng(0)
    lhs = draw.standard_normal((48, 128)).astype(np.float32)
    lhs[sum(sizes) :] = np.nan
    weight = draw.standard_normal((4, 128, 128)).astype(np.float32)
    out = None
    for half, rest in enumerate((("zero", "leave"), ("keep", "zero"))):
        with without_races() as interpret:
            (out,) = kernel.gmm(
                *(lhs, weight[2 * half : 2 * half + 2], jnp.array(sizes, jnp.int32), out),
                transpose_rhs=False,
                group_offset=2 * half,
                rest=rest,
                interpret=interpret,
                tiles=Tiles(16, 128, 128),
            )
            out = jnp.asarray(np.asarray(out))
    want = gmm(torch.tensor(lhs), torch.tensor(weight), int32(sizes))
    np.testing.assert_allclose(out, want.numpy(), rtol=0, atol=1e-4)


WORKER = """
import json
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from pallas_ops.split_gmm import kernel

mesh = Mesh(np.array(jax.devices()), ("fsdp",))
draw = np.random.default_rng(0)
n, groups, k, size_n = 4, 8, 6, 10
sizes = draw.integers(0, 5, (n, groups)).astype(np.int32)
lhs = draw.standard_normal((n * 40, k)).astype(np.float32)
dout = draw.standard_normal((n * 40, size_n)).astype(np.float32)
weight = draw.standard_normal((groups, size_n, k)).astype(np.float32)
rows, shard = PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")
layout = {"weight_axis": "fsdp", "weight_dim": 0, "interpret": True}

def forward(lhs, rhs, sizes):
    return kernel.split_gmm_sharded(lhs, rhs, sizes, transpose_rhs=True, **layout)[0]

def gradient(left, right, sizes):
    dtypes = {"out_dtype": "float32", "reduce_dtype": "float32", "row_axes": ("fsdp",)}
    return kernel.split_tgmm_sharded(left, right, sizes, **dtypes, **layout)[0]

def on_mesh(function, in_specs, out_specs):
    specs = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
    return jax.jit(jax.shard_map(function, mesh=mesh, **specs))

split = weight.reshape(2, groups, size_n // 2, k)
call = on_mesh(forward, (rows, shard, rows), rows)
out = call(lhs, split, sizes)
grad = on_mesh(gradient, (rows, rows, rows), shard)(dout, lhs, sizes)
want, dweight = np.zeros_like(dout), np.zeros_like(weight)
for i in range(n):
    row = 40 * i
    for g, size in enumerate(sizes[i]):
        own = slice(row, row + size)
        want[own] = lhs[own] @ weight[g].T
        dweight[g] += dout[own].T @ lhs[own]
        row += size
text = call.lower(lhs, split, sizes).compile().as_text()
print(json.dumps({
    "forward": float(np.abs(out - want).max()),
    "gradient": float(np.abs(grad.reshape(weight.shape) - dweight).max()),
    "shard": grad.sharding.shard_shape(grad.shape),
    "gathers": [line.split(" = ")[1].split("{")[0] for line in text.splitlines()
                if " all-gather(" in line],
}))
"""


def test_each_half_is_gathered_on_its_own_and_its_gradient_stays_sharded():
    result = on_four_devices(WORKER)
    assert result["forward"] < 1e-4 and result["gradient"] < 1e-4
    assert result["shard"] == [2, 2, 5, 6]
    assert result["gathers"] == ["f32[8,5,6]"] * 2


LHS, RHS, FOUR = torch.zeros(4, 6), torch.zeros(2, 4, 3, 5), int32([1, 1, 1, 1])
TWO = OpSharding(mesh=(("fsdp", 2),), row_axes=("fsdp",))
BAD = {
    "rank": ((LHS, RHS[0], FOUR), {}, r"rhs has shape \[4, 3, 5\]; expected \[2, G, K/2, N\]"),
    "halves": ((LHS, RHS[:1], FOUR), {}, "expected 2 halves of an even number of groups"),
    "odd": ((LHS, RHS[:, :3], FOUR), {}, "expected 2 halves of an even number of groups"),
    "K": ((LHS[:, :5], RHS, FOUR), {}, "lhs has K=5 but rhs of .* has K=6 with transpose_rhs=F"),
    "groups": ((LHS, RHS, FOUR[:2]), {}, r"group_sizes has shape \[2\]; expected \[4\]"),
    "shards": (
        (LHS, RHS, int32([[0] * 4] * 2)),
        {"sharding": OpSharding((("fsdp", 2),), ("fsdp",), weight_dim=1)},
        "split_gmm: dim 1 of rhs has size 3, which axis 'fsdp' of size 2 does not divide",
    ),
    "rows": ((LHS[:3], RHS, int32([[0] * 4] * 2)), {"sharding": TWO}, "lhs has 3 rows, which 2"),
    "device": ((LHS, RHS.to("meta"), FOUR), {}, "rhs is on meta but lhs is on cpu"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    args, kwargs, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        split_gmm(*args, **kwargs)
