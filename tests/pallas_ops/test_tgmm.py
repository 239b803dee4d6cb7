"""tgmm on CPU tensors. Its numbers as a weight gradient are tested with gmm."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from pallas_ops import OpSharding, recycling, tgmm
from pallas_ops.tgmm.shapes import TINY

NAN = float("nan")


def int32(sizes):
    return torch.tensor(sizes, dtype=torch.int32)


def by_group(lhs, rhs, sizes):
    total = sum(sizes)
    pairs = zip(lhs[:total].split(sizes), rhs[:total].split(sizes), strict=True)
    return torch.stack([x.t() @ y for x, y in pairs])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 3))
def test_sum_of_outer_products_whatever_the_tail_holds(sizes, tail):
    lhs = torch.randn(sum(sizes) + tail, 4, dtype=torch.float64)
    rhs = torch.randn(sum(sizes) + tail, 3, dtype=torch.float64)
    lhs[sum(sizes) :] = NAN
    rhs[sum(sizes) :] = NAN
    out = tgmm(lhs, rhs, int32(sizes))
    torch.testing.assert_close(out, by_group(lhs, rhs, sizes))
    assert not out[int32(sizes) == 0].count_nonzero()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_accumulates_wide_and_rounds_once(shape, out_dtype):
    sizes = [shape.num_rows // shape.num_groups] * shape.num_groups
    lhs = torch.randn(shape.num_rows, shape.size_k).bfloat16()
    rhs = torch.randn(shape.num_rows, shape.size_n).bfloat16()
    exact = by_group(lhs.double(), rhs.double(), sizes)
    out = tgmm(lhs, rhs, int32(sizes), out_dtype=out_dtype)
    assert out.dtype == out_dtype
    rounding = torch.finfo(out_dtype).eps if out_dtype != torch.float64 else 1e-12
    torch.testing.assert_close(out.double(), exact, rtol=rounding, atol=1e-4)


def test_narrower_result():
    lhs, rhs = torch.randn(8, 4), torch.randn(8, 3)
    out = tgmm(lhs, rhs, int32([8]), out_dtype=torch.bfloat16)
    torch.testing.assert_close(out[0], (lhs.t() @ rhs).bfloat16(), rtol=0, atol=0)


def test_gradients_of_any_order():
    lhs = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    rhs = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)

    def product(lhs, rhs):
        return tgmm(lhs, rhs, int32([2, 0, 3]))

    assert torch.autograd.gradcheck(product, (lhs, rhs))
    assert torch.autograd.gradgradcheck(product, (lhs, rhs))


def test_sharded_rows_sum_over_shards():
    sharding = OpSharding(mesh=(("data", 2), ("fsdp", 2)), row_axes=("data", "fsdp"))
    lhs = torch.randn(12, 3, dtype=torch.float64)
    rhs = torch.randn(12, 2, dtype=torch.float64)
    sizes = int32([[1, 2], [0, 3], [2, 0], [0, 0]])
    out = tgmm(lhs, rhs, sizes, sharding=sharding)
    parts = zip(lhs.chunk(4), rhs.chunk(4), sizes, strict=True)
    torch.testing.assert_close(out, sum(tgmm(x, y, own) for x, y, own in parts))


@pytest.mark.parametrize(("group_offset", "num_groups"), [(0, 2), (2, None), (1, 1), (0, 4)])
@pytest.mark.parametrize("sharding", [None, "two shards"])
def test_range_of_groups_is_a_slice(group_offset, num_groups, sharding):
    sizes = int32([2, 3, 0, 1])
    if sharding:
        sharding, sizes = TWO, int32([[1, 1, 0, 1], [0, 1, 2, 1]])
    lhs = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    rhs = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)

    def part(lhs, rhs):
        return tgmm(
            lhs, rhs, sizes, group_offset=group_offset, num_groups=num_groups, sharding=sharding
        )

    end = 4 if num_groups is None else group_offset + num_groups
    whole = tgmm(lhs, rhs, sizes, sharding=sharding)[group_offset:end]
    torch.testing.assert_close(part(lhs, rhs), whole, rtol=0, atol=0)
    assert torch.autograd.gradcheck(part, (lhs, rhs))


def test_large_results_recycle_memory_of_dead_ones_only():
    shape, dtype = (2, 4096, 4096), torch.bfloat16
    first = recycling.empty(shape, dtype)
    address, view = first.data_ptr(), first[1:]
    del first
    second = recycling.empty(shape, dtype)
    assert second.data_ptr() != address  # the view still owns the first block
    del view
    assert recycling.empty(shape, dtype).data_ptr() == address
    assert (second.shape, second.dtype) == (shape, dtype)


def test_recycled_memory_does_not_show():
    lhs, rhs = torch.ones(3, 4096), torch.ones(3, 8192)
    assert tgmm(lhs, rhs, int32([1, 2])).sum() == 3 * 4096 * 8192
    assert tgmm(lhs, rhs, int32([0, 1])).sum() == 4096 * 8192


LHS, RHS, SIZES = torch.zeros(4, 3), torch.zeros(4, 5), int32([2, 2])
TWO = OpSharding(mesh=(("fsdp", 2),), row_axes=("fsdp",))
BAD = {
    "lhs rank": ((LHS[0], RHS, SIZES), {}, r"lhs has shape \[3\]; expected \[R, K\]"),
    "rhs rank": ((LHS, RHS[0], SIZES), {}, r"rhs has shape \[5\]; expected \[R, N\]"),
    "integers": ((LHS.int(), RHS, SIZES), {}, "lhs is torch.int32; convert"),
    "dtypes": ((LHS, RHS.double(), SIZES), {}, "lhs is torch.float32 but rhs is torch.float64"),
    "rows": ((LHS, RHS[:3], SIZES), {}, "lhs has 4 rows but rhs has 3; pass the same"),
    "int64 sizes": ((LHS, RHS, SIZES.long()), {}, "group_sizes is torch.int64"),
    "sizes rank": ((LHS, RHS, SIZES[None]), {}, r"shape \[1, 2\]; expected \[G\]"),
    "shards": ((LHS, RHS, SIZES), {"sharding": TWO}, r"shape \[2\]; expected \[2, G\]"),
    "device": ((LHS, RHS, SIZES.to("meta")), {}, "group_sizes is on meta but lhs is on cpu"),
    "no group": ((LHS, RHS, int32([])), {}, r"group_sizes has shape \[0\]; give at least one"),
    "out dtype": ((LHS, RHS, SIZES), {"out_dtype": torch.int32}, "out_dtype is torch.int32; give"),
    "no group asked for": (
        (LHS, RHS, SIZES),
        {"num_groups": 0},
        "group_offset=0 and num_groups=0 ask for groups that are not among the 2",
    ),
    "group after the last": (
        (LHS, RHS, SIZES),
        {"group_offset": 1, "num_groups": 2},
        "group_offset=1 and num_groups=2 ask for groups that are not among the 2",
    ),
    "group before the first": ((LHS, RHS, SIZES), {"group_offset": -1}, "group_offset=-1 and num"),
    "too many rows": ((LHS, RHS, int32([4, 1])), {}, "sum to 5 but there are 4 rows"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    args, kwargs, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        tgmm(*args, **kwargs)
