"""gmm on CPU tensors against a dense masked product that knows nothing of groups of rows."""

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from pallas_ops import OpSharding, gmm
from pallas_ops.gmm import reference
from pallas_ops.gmm.shapes import KNOWN_ISSUES, TINY

FP64 = torch.float64
NAN = float("nan")


def dense(lhs, rhs, sizes, transpose_rhs):
    """All rows times all matrices, then the owner's product is selected: [R, G] one-hot owners."""
    ends = torch.tensor(sizes).cumsum(0)
    row = torch.arange(lhs.shape[0])[:, None]
    owner = (row < ends) & (row >= ends - torch.tensor(sizes))
    lhs = torch.where(owner.any(1, keepdim=True), lhs, 0)
    equation = "rk,gnk,rg->rn" if transpose_rhs else "rk,gkn,rg->rn"
    return torch.einsum(equation, lhs, rhs, owner.to(lhs.dtype))


def operands(num_rows, sizes, size_k, size_n, transpose_rhs, dtype=FP64):
    lhs = torch.randn(num_rows, size_k, dtype=dtype)
    shape = (size_n, size_k) if transpose_rhs else (size_k, size_n)
    rhs = torch.randn(len(sizes), *shape, dtype=dtype)
    dout = torch.randn(num_rows, size_n, dtype=dtype)
    return lhs, rhs, dout


def run(function, lhs, rhs, dout, *args, **kwargs):
    """Output, gradient of lhs, gradient of rhs."""
    lhs, rhs = lhs.clone().requires_grad_(), rhs.clone().requires_grad_()
    out = function(lhs, rhs, *args, **kwargs)
    return out.detach(), *torch.autograd.grad(out, (lhs, rhs), dout)


def int32(sizes):
    return torch.tensor(sizes, dtype=torch.int32)


def even(num_rows, num_groups):
    """Sizes that differ by at most one row; zeros last when there are more groups than rows."""
    return [num_rows // num_groups + (g < num_rows % num_groups) for g in range(num_groups)]


@st.composite
def groups(draw):
    """Rows and sizes: group ends drawn with replacement, so empty groups and tails occur."""
    num_rows = draw(st.integers(1, 24))
    ends = draw(st.lists(st.integers(0, num_rows), min_size=1, max_size=6).map(sorted))
    return num_rows, [end - start for start, end in itertools.pairwise([0, *ends])]


@given(groups(), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_equals_dense_product_whatever_the_tail_holds(case, size_k, size_n, transpose_rhs):
    num_rows, sizes = case
    lhs, rhs, dout = operands(num_rows, sizes, size_k, size_n, transpose_rhs)
    expected = run(dense, lhs, rhs, dout, sizes, transpose_rhs)
    lhs[sum(sizes) :] = NAN
    dout[sum(sizes) :] = NAN
    result = run(gmm, lhs, rhs, dout, int32(sizes), transpose_rhs=transpose_rhs)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    for rows in result[:2]:
        assert not rows[sum(sizes) :].count_nonzero()


def test_every_pattern_of_empty_groups():
    lhs, rhs, dout = operands(26, [3] * 8, 4, 3, False)
    for pattern in itertools.product((0, 3), repeat=8):
        result = run(gmm, lhs, rhs, dout, int32(pattern))
        torch.testing.assert_close(result, run(dense, lhs, rhs, dout, pattern, False))
        for size, gradient in zip(pattern, result[2], strict=True):
            assert size or not gradient.count_nonzero()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", TINY + KNOWN_ISSUES, ids=lambda shape: shape.name)
def test_error_is_that_of_plain_products(shape, dtype):
    sizes = shape.group_sizes or even(shape.num_rows, shape.num_groups)
    lhs, rhs, dout = operands(
        shape.num_rows, sizes, shape.size_k, shape.size_n, shape.transpose_rhs, dtype
    )
    lhs[sum(sizes) :] = NAN
    dout[sum(sizes) :] = NAN

    def plain(lhs, rhs):
        rows = lhs[: sum(sizes)].split(sizes)
        weights = rhs.mT if shape.transpose_rhs else rhs
        products = [x @ w for x, w in zip(rows, weights, strict=True)]
        return torch.cat([*products, dout.new_zeros(shape.num_rows - sum(sizes), shape.size_n)])

    wide = (lhs.double(), rhs.double(), dout.double())
    exact = run(dense, *wide[:2], wide[2].nan_to_num(), sizes, shape.transpose_rhs)
    baseline = run(plain, lhs, rhs, dout)
    result = run(gmm, lhs, rhs, dout, int32(sizes), transpose_rhs=shape.transpose_rhs)
    for got, want, theirs in zip(result, exact, baseline, strict=True):
        assert got.dtype == dtype
        floor = torch.finfo(dtype).eps * 1e-2 * want.abs().max()
        assert (got - want).abs().max() <= 2 * (theirs - want).abs().max() + floor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, FP64])
def test_tiny_values_stay_finite(dtype):  # tpu-inference 1867
    tiny = torch.finfo(dtype).tiny
    lhs, rhs, dout = (x * tiny for x in operands(8, [3, 5], 4, 3, False, dtype))
    for tensor in run(gmm, lhs, rhs, dout, int32([3, 5])):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_master_weights_are_cast_and_their_gradient_is_not_rounded(transpose_rhs):
    sizes = [40, 0, 88]
    lhs, rhs, dout = operands(128, sizes, 48, 24, transpose_rhs, torch.float32)
    lhs, dout = lhs.bfloat16(), dout.bfloat16()
    out, dlhs, drhs = run(gmm, lhs, rhs, dout, int32(sizes), transpose_rhs=transpose_rhs)
    expected = run(gmm, lhs, rhs.bfloat16(), dout, int32(sizes), transpose_rhs=transpose_rhs)
    torch.testing.assert_close((out, dlhs), expected[:2], rtol=0, atol=0)
    assert drhs.dtype == torch.float32 and not drhs[1].count_nonzero()
    exact = run(dense, lhs.double(), rhs.double(), dout.double(), sizes, transpose_rhs)[2]
    torch.testing.assert_close(drhs.double(), exact, rtol=1e-5, atol=1e-5)


def test_gradients_of_any_order():
    sizes = int32([2, 0, 3])
    for transpose_rhs in (False, True):
        lhs, rhs, _ = operands(6, [2, 0, 3], 3, 2, transpose_rhs)

        def product(lhs, rhs, transpose_rhs=transpose_rhs):
            return gmm(lhs, rhs, sizes, transpose_rhs=transpose_rhs)

        inputs = (lhs.requires_grad_(), rhs.requires_grad_())
        assert torch.autograd.gradcheck(product, inputs)
        assert torch.autograd.gradgradcheck(product, inputs)


def part_of(lhs, rhs, kept, sizes, offset, transpose_rhs):
    """The dense product with some groups' matrices, other rows from `kept` or zero."""
    matrices = torch.zeros(len(sizes), *rhs.shape[1:], dtype=rhs.dtype)
    matrices = torch.cat([matrices[:offset], rhs, matrices[offset + len(rhs) :]])
    row, bounds = torch.arange(len(lhs))[:, None], [0, *itertools.accumulate(sizes)]
    own = (row >= bounds[offset]) & (row < bounds[offset + len(rhs)])
    out = dense(torch.where(own, lhs, 0), matrices, sizes, transpose_rhs)
    return torch.where(own, out, 0 if kept is None else kept)


@given(groups(), st.booleans(), st.booleans(), st.data())
def test_groups_of_a_range_keep_the_others(case, transpose_rhs, keeps, data):
    num_rows, sizes = case
    offset = data.draw(st.integers(0, len(sizes) - 1))
    end = data.draw(st.integers(offset + 1, len(sizes)))
    lhs, rhs, dout = operands(num_rows, sizes, 5, 3, transpose_rhs)
    rhs, kept = rhs[offset:end].clone(), torch.randn_like(dout) if keeps else None
    leaves = [t.requires_grad_() for t in (lhs, rhs, kept) if t is not None]
    out = gmm(
        *(lhs, rhs, int32(sizes)),
        transpose_rhs=transpose_rhs,
        group_offset=offset,
        partial_sum=kept,
    )
    expected = part_of(lhs, rhs, kept, sizes, offset, transpose_rhs)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    got, want = (torch.autograd.grad(y, leaves, dout) for y in (out, expected))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_range_never_reads_what_is_outside_it():
    sizes, own = [3, 2, 0, 3], slice(3, 5)
    lhs, rhs, _ = operands(9, sizes, 4, 3, False)
    kept = torch.randn(9, 3, dtype=FP64)
    clean = gmm(lhs, rhs[1:3], int32(sizes), group_offset=1, partial_sum=kept)
    lhs[: own.start], lhs[own.stop :], kept[own] = NAN, NAN, NAN
    result = gmm(lhs, rhs[1:3], int32(sizes), group_offset=1, partial_sum=kept)
    torch.testing.assert_close(result, clean, rtol=0, atol=0)
    assert not gmm(lhs, rhs[1:3], int32(sizes), group_offset=1)[5:].count_nonzero()


def test_gradients_of_a_range_of_any_order_and_over_shards():
    sharding = OpSharding(mesh=(("fsdp", 2),), row_axes=("fsdp",), weight_dim=None)
    sizes = int32([[2, 0, 1], [0, 3, 1]])
    lhs, rhs, kept = operands(8, [0] * 2, 3, 2, False)

    def product(lhs, rhs, kept):
        return gmm(lhs, rhs, sizes, group_offset=1, partial_sum=kept, sharding=sharding)

    inputs = [t.requires_grad_() for t in (lhs, rhs, kept)]
    assert torch.autograd.gradcheck(product, inputs)
    assert torch.autograd.gradgradcheck(product, inputs)


def test_only_wanted_gradients_are_computed(monkeypatch):
    lhs, rhs, dout = operands(4, [4], 3, 2, False)
    out = gmm(lhs, rhs.requires_grad_(), int32([4]))
    monkeypatch.setattr(reference, "gmm", None)  # dlhs would call it
    out.backward(dout)
    torch.testing.assert_close(rhs.grad[0], lhs.t() @ dout)


def test_permuting_rows_inside_a_group_permutes_the_result():
    lhs, rhs, dout = operands(9, [4, 5], 6, 5, True)
    order = torch.cat([torch.randperm(4), 4 + torch.randperm(5)])
    sizes = int32([4, 5])
    out, dlhs, drhs = run(gmm, lhs, rhs, dout, sizes, transpose_rhs=True)
    permuted = run(gmm, lhs[order], rhs, dout[order], sizes, transpose_rhs=True)
    torch.testing.assert_close(permuted, (out[order], dlhs[order], drhs))


def test_splitting_a_group_with_equal_weights_and_dropping_an_empty_one_change_nothing():
    lhs, rhs, dout = operands(9, [4, 5], 6, 5, False)
    out, dlhs, drhs = run(gmm, lhs, rhs, dout, int32([4, 5]))
    split = run(gmm, lhs, rhs[[0, 1, 1]], dout, int32([4, 2, 3]))
    torch.testing.assert_close(split[:2], (out, dlhs))
    torch.testing.assert_close(split[2][1] + split[2][2], drhs[1])
    with_empty = run(gmm, lhs, rhs[[0, 0, 1]], dout, int32([4, 0, 5]))
    torch.testing.assert_close(with_empty[:2], (out, dlhs))
    torch.testing.assert_close(with_empty[2][[0, 2]], drhs)


def test_non_contiguous_operands():
    lhs, rhs, dout = operands(8, [3, 5], 6, 4, False)
    strided = run(gmm, lhs.t().contiguous().t(), rhs.mT.contiguous().mT, dout, int32([3, 5]))
    torch.testing.assert_close(strided, run(gmm, lhs, rhs, dout, int32([3, 5])))


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_sharded_rows_equal_shards_one_by_one(num_shards):
    sharding = OpSharding(mesh=(("fsdp", num_shards),), row_axes=("fsdp",))
    sizes = int32([[3, 0, 1, 2], [0, 0, 6, 0], [0, 0, 0, 0], [1, 1, 1, 1]])[:num_shards]
    lhs, rhs, dout = operands(6 * num_shards, [0] * 4, 5, 3, True)
    result = run(gmm, lhs, rhs, dout, sizes, transpose_rhs=True, sharding=sharding)
    parts = [
        run(gmm, x, rhs, dy, own, transpose_rhs=True)
        for x, dy, own in zip(lhs.chunk(num_shards), dout.chunk(num_shards), sizes, strict=True)
    ]
    outs, dlhs, drhs = zip(*parts, strict=True)
    torch.testing.assert_close(result, (torch.cat(outs), torch.cat(dlhs), sum(drhs)))


def test_reduce_dtype_rounds_the_gradient_between_shards():
    sharding = OpSharding(mesh=(("fsdp", 2),), row_axes=("fsdp",), weight_dim=None)
    lhs, rhs, dout = operands(16, [8], 5, 3, False, torch.float32)
    sizes = int32([[8], [8]])
    *_, wide = run(gmm, lhs, rhs, dout, sizes, sharding=sharding)
    *_, narrow = run(gmm, lhs, rhs, dout, sizes, reduce_dtype=torch.bfloat16, sharding=sharding)
    assert wide.dtype == narrow.dtype == torch.float32
    torch.testing.assert_close(wide, (lhs.t() @ dout)[None])
    torch.testing.assert_close(narrow, narrow.bfloat16().float(), rtol=0, atol=0)
    torch.testing.assert_close(narrow, wide, rtol=3e-2, atol=3e-2)


LHS, RHS, SIZES = torch.zeros(4, 3), torch.zeros(2, 3, 5), int32([2, 2])
TWO = OpSharding(mesh=(("fsdp", 2),), row_axes=("fsdp",))
BAD = {
    "lhs rank": ((LHS[0], RHS, SIZES), {}, r"lhs has shape \[3\]; expected \[R, K\]"),
    "rhs rank": ((LHS, RHS[0], SIZES), {}, r"rhs has shape \[3, 5\]; expected \[G, K, N\]"),
    "lhs dtype": ((LHS.int(), RHS, SIZES), {}, "lhs is torch.int32; convert"),
    "rhs dtype": ((LHS, RHS.long(), SIZES), {}, "rhs is torch.int64; convert"),
    "K": ((LHS[:, :2], RHS, SIZES), {}, "lhs has K=2 but rhs .* has K=3"),
    "transpose": ((LHS, RHS, SIZES), {"transpose_rhs": True}, "K=5 with transpose_rhs=True; check"),
    "int64 sizes": ((LHS, RHS, SIZES.long()), {}, r"group_sizes is torch.int64; .*to\(torch.int32"),
    "groups": ((LHS, RHS, int32([4])), {}, r"group_sizes has shape \[1\]; expected \[2\]"),
    "sizes rank": ((LHS, RHS, SIZES[None]), {}, r"shape \[1, 2\]; expected \[2\]"),
    "shards of sizes": ((LHS, RHS, SIZES), {"sharding": TWO}, r"shape \[2\]; expected \[2, 2\]"),
    "rows of shards": (
        (LHS[:3], RHS, int32([[1, 0], [1, 0]])),
        {"sharding": TWO},
        "lhs has 3 rows, which 2 row shards .* do not divide; pad",
    ),
    "weight shards": (
        (LHS, RHS, int32([[1, 0], [1, 0]])),
        {"sharding": OpSharding((("fsdp", 2),), ("fsdp",), weight_dim=1)},
        "dim 1 of rhs has size 3, which axis 'fsdp' of size 2 does not divide; choose",
    ),
    "device": ((LHS, RHS.to("meta"), SIZES), {}, "rhs is on meta but lhs is on cpu; move"),
    "no group": ((LHS, RHS[:0], int32([])), {}, r"group_sizes has shape \[0\]; give at least one"),
    "reduce dtype": ((LHS, RHS, SIZES), {"reduce_dtype": torch.int8}, "reduce_dtype is torch.int8"),
    "range": ((LHS, RHS, SIZES), {"group_offset": 1}, "group_offset=1 and the 2 groups of rhs are"),
    "before": (
        (LHS, RHS, SIZES),
        {"group_offset": -1},
        "group_offset=-1 and .* sizes of all groups",
    ),
    "kept shape": (
        (LHS, RHS, SIZES),
        {"partial_sum": torch.zeros(4, 3)},
        r"partial_sum is torch.float32 of shape \[4, 3\]; expected torch.float32 of shape \[4, 5\]",
    ),
    "kept dtype": (
        (LHS, RHS, SIZES),
        {"partial_sum": torch.zeros(4, 5).double()},
        r"partial_sum is torch.float64 of .*; expected torch.float32",
    ),
    "too many rows": ((LHS, RHS, int32([2, 3])), {}, "sum to 5 but there are 4 rows"),
    "negative": ((LHS, RHS, int32([-1, 3])), {}, "group_sizes holds -1; sizes must not"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    args, kwargs, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        gmm(*args, **kwargs)
