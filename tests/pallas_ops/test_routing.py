"""routing_plan against a stable argsort, which it must equal without sorting."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from hypothesis.extra.numpy import arrays
from torch.utils._python_dispatch import TorchDispatchMode

from pallas_ops import OpSharding, routing_plan
from pallas_ops.routing import reference
from pallas_ops.routing.shapes import TINY


def by_argsort(ids, num_experts):
    slots = torch.argsort(ids.flatten(), stable=True)
    rows = torch.empty_like(slots)
    rows[slots] = torch.arange(len(slots))
    sizes = torch.bincount(ids.flatten(), minlength=num_experts)
    return sizes.int(), rows.view(ids.shape).int(), slots.int()


def zipf_ids(num_tokens, top_k, num_experts, skew):
    """Distinct experts a token, drawn by a Zipf law."""
    weights = (1 + torch.arange(num_experts)).double() ** -skew
    return torch.multinomial(weights.expand(num_tokens, -1), top_k).int()


@st.composite
def tied_ids(draw):
    """Few experts or many, any ties, also inside one token."""
    num_experts = draw(st.integers(1, 12))
    shape = draw(st.tuples(st.integers(0, 40), st.integers(1, 4)))
    used = draw(st.integers(1, num_experts))
    ids = draw(arrays("int32", shape, elements=st.integers(0, used - 1)))
    return torch.from_numpy(ids), num_experts


@given(tied_ids(), st.integers(1, 50))
def test_equals_stable_argsort_for_every_block(case, block):
    ids, num_experts = case
    sizes, rows, slots = reference.routing_plan(ids, num_experts, block=block)
    torch.testing.assert_close((sizes[0], rows, slots), by_argsort(ids, num_experts))


@pytest.mark.parametrize("block", [256, 1024])
@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_equals_stable_argsort_over_several_blocks(shape, block):  # uzu 715
    ids = zipf_ids(shape.num_tokens, shape.top_k, shape.num_experts, shape.skew)
    sizes, rows, slots = reference.routing_plan(ids, shape.num_experts, block=block)
    torch.testing.assert_close((sizes[0], rows, slots), by_argsort(ids, shape.num_experts))


def test_plan_of_a_skewed_batch():
    ids = zipf_ids(512, 8, 128, 1.5)
    plan = routing_plan(ids, 128)
    torch.testing.assert_close(tuple(plan[:3]), by_argsort(ids, 128))
    assert {tensor.dtype for tensor in plan[:3]} == {torch.int32}


def test_all_to_one_expert_keeps_the_order():
    plan = routing_plan(torch.full((300, 4), 3, dtype=torch.int32), 5)
    assert plan.group_sizes.tolist() == [0, 0, 0, 1200, 0]
    assert plan.row_of_slot.flatten().tolist() == plan.slot_of_row.tolist() == list(range(1200))


def test_neither_sort_nor_whole_one_hot_table():
    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.append((func.overloadpacket.__name__, out))
            return out

    ids = zipf_ids(4096, 8, 128, 0.0)
    with Record():
        reference.routing_plan(ids, 128)
    assert not {"sort", "argsort", "topk"} & {name for name, _ in seen}
    largest = max(out.numel() for _, out in seen if isinstance(out, torch.Tensor))
    assert largest <= 128 * 1024 < 128 * ids.numel()


def test_shards_are_planned_one_by_one():
    sharding = OpSharding(mesh=(("fsdp", 4),), row_axes=("fsdp",))
    ids = zipf_ids(64, 3, 7, 0.5)
    plan = routing_plan(ids, 7, sharding=sharding)
    sizes, rows, slots = zip(*(routing_plan(part, 7)[:3] for part in ids.chunk(4)), strict=True)
    torch.testing.assert_close(plan[:3], (torch.stack(sizes), torch.cat(rows), torch.cat(slots)))


IDS = torch.zeros(4, 2, dtype=torch.int32)
TWO = OpSharding(mesh=(("fsdp", 2),), row_axes=("fsdp",))
KERNEL = {"implementation": "kernel"}
BAD = {
    "rank": ((IDS[0], 3), {}, r"expert_ids has shape \[2\]; expected \[T, K\]"),
    "int64": ((IDS.long(), 3), {}, r"expert_ids is torch.int64; convert it by .to\(torch.int32\)"),
    "experts": ((IDS, 0), {}, "num_experts is 0; it must be at least 1"),
    "too large": ((IDS + 3, 3), {}, r"expert_ids span 3 to 3; ids must lie in \[0, 3\)"),
    "negative": ((IDS - 1, 3), {}, "expert_ids span -1 to -1"),
    "shards": ((IDS[:3], 3), {"sharding": TWO}, "expert_ids has 3 rows, which 2 row shards"),
    "implementation": ((IDS, 3), {"implementation": "sort"}, "'sort'; use 'gather' or 'kernel'"),
    "block": ((IDS, 3), KERNEL | {"block": 12}, "block is 12; it must be a positive multiple of 8"),
    "no token": ((IDS[:0], 3), KERNEL, r"shape \[0, 2\]; kernels need a token, use impl"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    args, kwargs, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        routing_plan(*args, **kwargs)
