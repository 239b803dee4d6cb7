"""permute and its gradient, the sum of a token's rows, on CPU tensors."""

import pytest
import torch

from pallas_ops import OpSharding, permute, routing_plan
from pallas_ops.permute.shapes import TINY


def plan_of(shape, **kwargs):
    ids = torch.rand(shape.num_tokens, shape.num_experts).topk(shape.top_k).indices.int()
    return ids, routing_plan(ids, shape.num_experts, **kwargs)


def shapes(function):
    return pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)(function)


@shapes
def test_rows_are_bit_exact_copies_in_expert_order(shape):
    ids, plan = plan_of(shape)
    x = torch.randn(shape.num_tokens, shape.width).bfloat16()
    x[0] = float("nan")
    tokens = torch.argsort(ids.flatten(), stable=True) // shape.top_k
    rows = permute(x, plan)
    assert torch.equal(rows.view(torch.int16), x[tokens].view(torch.int16))


@shapes
def test_gradient_is_one_rounding_of_the_wide_sum(shape):
    ids, plan = plan_of(shape)
    x = torch.randn(shape.num_tokens, shape.width).bfloat16().requires_grad_()
    drows = torch.randn(ids.numel(), shape.width).bfloat16()
    permute(x, plan).backward(drows)
    exact = drows.double()[plan.row_of_slot].sum(1)
    # Half a unit in the last place for the rounding, and fp32 noise where terms cancel.
    torch.testing.assert_close(x.grad.double(), exact, rtol=2**-8, atol=1e-5)


def test_gradients_of_any_order():
    plan = routing_plan(torch.randint(0, 3, (4, 3)).int(), 3)
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute(x, plan), x)
    assert torch.autograd.gradgradcheck(lambda x: permute(x, plan), x)


def test_sharded_tokens_stay_in_their_shard():
    sharding = OpSharding(mesh=(("fsdp", 4),), row_axes=("fsdp",))
    ids, plan = plan_of(TINY[1], sharding=sharding)
    x = torch.randn(TINY[1].num_tokens, 8, requires_grad=True)
    drows = torch.randn(ids.numel(), 8)
    rows = permute(x, plan, sharding=sharding)
    rows.backward(drows)
    for part, dpart, own, out, dx in zip(
        *(t.chunk(4) for t in (x, drows, ids, rows, x.grad)), strict=True
    ):
        part = part.detach().requires_grad_()
        alone = permute(part, routing_plan(own, TINY[1].num_experts))
        alone.backward(dpart)
        torch.testing.assert_close((out, dx), (alone, part.grad), rtol=0, atol=0)


X, PLAN = torch.zeros(4, 3), routing_plan(torch.zeros(4, 2, dtype=torch.int32), 1)
TWO, THREE = (OpSharding(mesh=(("fsdp", n),), row_axes=("fsdp",)) for n in (2, 3))
PLAN_OF_TWO = routing_plan(torch.zeros(4, 2, dtype=torch.int32), 1, sharding=TWO)
BAD = {
    "rank": ((X[0], PLAN), {}, r"x has shape \[3\]; expected \[T, D\]"),
    "dtype": ((X.int(), PLAN), {}, "x is torch.int32; convert"),
    "tokens": ((X[:3], PLAN), {}, "x has 3 tokens but plan has 4; pass the plan"),
    "device": ((X.to("meta"), PLAN), {}, "plan is on cpu but x is on meta"),
    "shards": ((X, PLAN), {"sharding": THREE}, "x has 4 rows, which 3 row shards"),
    "plan of one": ((X, PLAN), {"sharding": TWO}, "plan is of one device but the call of 2 shards"),
    "plan of two": ((X, PLAN_OF_TWO), {}, "of 2 shards but the call of one device; pass the shar"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    args, kwargs, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        permute(*args, **kwargs)
