"""combine and its gradients on CPU tensors against a plain gather and sum."""

import pytest
import torch

from pallas_ops import OpSharding, combine, permute, routing_plan
from pallas_ops.combine.shapes import TINY


def case_of(shape, dtype=torch.bfloat16, weights_dtype=torch.float32, **kwargs):
    ids = torch.rand(shape.num_tokens, shape.num_experts).topk(shape.top_k).indices.int()
    plan = routing_plan(ids, shape.num_experts, **kwargs)
    rows = torch.randn(ids.numel(), shape.width).to(dtype).requires_grad_()
    weights = torch.rand(ids.shape).to(weights_dtype).requires_grad_()
    dout = torch.randn(shape.num_tokens, shape.width).to(dtype)
    return ids, plan, rows, weights, dout


def exact(rows, weights, plan, dout):
    """Output and both gradients in fp64, by autograd of a gather."""
    rows, weights = (t.detach().double().requires_grad_() for t in (rows, weights))
    out = (rows[plan.row_of_slot] * weights[..., None]).sum(1)
    return out, *torch.autograd.grad(out, (rows, weights), dout.double())


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)
def test_one_rounding_forward_and_backward(shape, weights_dtype):
    _, plan, rows, weights, dout = case_of(shape, weights_dtype=weights_dtype)
    out = combine(rows, weights, plan)
    drows, dweights = torch.autograd.grad(out, (rows, weights), dout)
    expected, _, exact_dweights = exact(rows, weights, plan, dout)
    half_ulp = 2**-8
    torch.testing.assert_close(out.double(), expected, rtol=half_ulp, atol=1e-5)
    # An fp32 product of bf16 and fp32, rounded once: reproducible to the bit.
    products = weights.detach().float()[..., None] * dout.float()[:, None]
    slots = products.flatten(0, 1)[plan.slot_of_row]
    assert torch.equal(drows, slots.bfloat16())
    assert dweights.dtype == weights_dtype
    rtol = half_ulp if weights_dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(dweights.double(), exact_dweights, rtol=rtol, atol=1e-4)


def test_gradients_of_any_order():
    plan = routing_plan(torch.randint(0, 3, (4, 3)).int(), 3)
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((12, 2), (4, 3))]
    assert torch.autograd.gradcheck(lambda r, w: combine(r, w, plan), inputs)
    assert torch.autograd.gradgradcheck(lambda r, w: combine(r, w, plan), inputs)


def test_unit_weights_undo_permute():
    _, plan, _, weights, _ = case_of(TINY[1])
    x = torch.randn(TINY[1].num_tokens, 8, dtype=torch.float64)
    out = combine(permute(x, plan), torch.ones_like(weights), plan)
    torch.testing.assert_close(out, x * TINY[1].top_k)


def test_order_of_experts_does_not_matter():
    ids, plan, rows, weights, _ = case_of(TINY[4], torch.float64, torch.float64)
    relabel = torch.randperm(TINY[4].num_experts).int()
    other = routing_plan(relabel[ids], TINY[4].num_experts)
    moved = torch.empty_like(rows)
    moved[other.row_of_slot] = rows.detach()[plan.row_of_slot]
    torch.testing.assert_close(combine(moved, weights, other), combine(rows, weights, plan))


def test_sharded_tokens_use_rows_of_their_shard():
    sharding = OpSharding(mesh=(("fsdp", 4),), row_axes=("fsdp",))
    ids, plan, rows, weights, dout = case_of(TINY[1], sharding=sharding)
    out = combine(rows, weights, plan, sharding=sharding)
    drows, dweights = torch.autograd.grad(out, (rows, weights), dout)
    whole = zip(
        *(t.chunk(4) for t in (ids, rows, weights, dout, out, drows, dweights)), strict=True
    )
    for own, r, w, dy, *got in whole:
        r, w = r.detach().requires_grad_(), w.detach().requires_grad_()
        alone = combine(r, w, routing_plan(own, TINY[1].num_experts))
        expected = [alone, *torch.autograd.grad(alone, (r, w), dy)]
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


ROWS, WEIGHTS = torch.zeros(8, 3), torch.zeros(4, 2)
PLAN = routing_plan(torch.zeros(4, 2, dtype=torch.int32), 1)
TWO, THREE = (OpSharding(mesh=(("fsdp", n),), row_axes=("fsdp",)) for n in (2, 3))
BAD = {
    "rank": ((ROWS[0], WEIGHTS, PLAN), {}, r"rows has shape \[3\]; expected \[R, D\]"),
    "rows dtype": ((ROWS.int(), WEIGHTS, PLAN), {}, "rows is torch.int32; convert"),
    "weights dtype": ((ROWS, WEIGHTS.int(), PLAN), {}, "weights is torch.int32; convert"),
    "weights": ((ROWS, WEIGHTS.t(), PLAN), {}, r"shape \[2, 4\] but plan routes .*\[4, 2\]; pass"),
    "rows": ((ROWS[:7], WEIGHTS, PLAN), {}, "rows has 7 rows but plan has 8 slots; pass"),
    "device": ((ROWS, WEIGHTS.to("meta"), PLAN), {}, "weights is on meta but rows is on cpu"),
    "shards": ((ROWS, WEIGHTS, PLAN), {"sharding": THREE}, "weights has 4 rows, which 3 row"),
    "plan": ((ROWS, WEIGHTS, PLAN), {"sharding": TWO}, "plan is of one device but the call of 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    args, kwargs, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        combine(*args, **kwargs)
