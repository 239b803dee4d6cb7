"""combine: every token is the weighted sum of its K expert rows."""

import torch
from torch import Tensor

from pallas_ops.checks import check_float, check_one_device, check_rank, check_row_shards
from pallas_ops.combine import reference
from pallas_ops.permute.op import slots
from pallas_ops.routing.op import RoutingPlan
from pallas_ops.sharding import OpSharding, decode, encode, num_row_shards


def combine(
    rows: Tensor, weights: Tensor, plan: RoutingPlan, *, sharding: OpSharding | None = None
) -> Tensor:
    """out[t] = sum over k of weights[t, k] * rows[row_of_slot[t, k]].

    Products and sums in fp32 at least, one rounding. Differentiable in `rows` and `weights`, any
    number of times: drows is an fp32 product rounded once, dweights an fp32 dot product. A row or
    weight that is not finite reaches its own token alone. With a plan for kernels, a cotangent that
    is not finite makes NaN of that column of drows for all tokens of its block, and its -0 counts
    as 0.

    Args:
        rows: [T * K, D] in the expert-sorted order of `plan`, any float dtype.
        weights: [T, K], any float dtype.
        plan: the routing of the same T tokens.
        sharding: layout on the mesh, None on one device; the one `plan` was made with.

    Returns:
        [T, D] of rows.dtype.

    Raises:
        ValueError: wrong rank, dtype or device, weights or rows that do not belong to the plan, a
            plan of another number of row shards, tokens that the mesh does not divide, rows that
            the kernels do not take with a plan made for them.
    """
    check_one_device("combine", rows=rows, weights=weights, plan=plan.row_of_slot)
    check_float("combine", rows=rows, weights=weights)
    check_rank("combine", "rows", rows, "R, D")
    if weights.shape != plan.row_of_slot.shape:
        raise ValueError(
            f"combine: weights has shape {list(weights.shape)} but plan routes [T, K] = "
            f"{list(plan.row_of_slot.shape)}; pass one weight for every routed slot"
        )
    if rows.shape[0] != weights.numel():
        raise ValueError(
            f"combine: rows has {rows.shape[0]} rows but plan has {weights.numel()} slots; "
            "pass the rows that permute made with this plan"
        )
    check_row_shards("combine", "weights", weights.shape[0], sharding)
    return _combine(rows, weights, plan.operands("combine", rows, sharding), encode(sharding))


@torch.library.custom_op("pallas_ops::combine", mutates_args=(), device_types="cpu")
def _combine(rows: Tensor, weights: Tensor, plan: list[Tensor], sharding: str) -> Tensor:
    num_shards = num_row_shards(decode(sharding))
    row_of_slot, _ = slots(plan, weights.shape[0], num_shards)
    return reference.combine(rows, weights, row_of_slot, num_shards=num_shards)


@_combine.register_kernel("xla")
def _(rows, weights, plan, sharding):
    from pallas_ops import bridge
    from pallas_ops.combine import kernel

    fn = kernel.combine if len(plan) == 2 else kernel.combine_windows
    return bridge.call_by_rows(fn, (rows, weights, *plan), decode(sharding), num_outputs=1)[0]


@_combine.register_fake
def _(rows, weights, plan, sharding):
    return rows.new_empty(weights.shape[0], rows.shape[1])


@torch.library.custom_op("pallas_ops::combine_backward", mutates_args=(), device_types="cpu")
def _combine_backward(
    dout: Tensor, rows: Tensor, weights: Tensor, plan: list[Tensor], sharding: str
) -> tuple[Tensor, Tensor]:
    num_shards = num_row_shards(decode(sharding))
    row_of_slot, _ = slots(plan, weights.shape[0], num_shards)
    return reference.combine_backward(dout, rows, weights, row_of_slot, num_shards=num_shards)


@_combine_backward.register_kernel("xla")
def _(dout, rows, weights, plan, sharding):
    from pallas_ops import bridge
    from pallas_ops.combine import kernel

    fn = kernel.combine_backward if len(plan) == 2 else kernel.combine_backward_windows
    operands = (dout, rows, weights, *plan)
    return bridge.call_by_rows(fn, operands, decode(sharding), num_outputs=2)


@_combine_backward.register_fake
def _(dout, rows, weights, plan, sharding):
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _combine_setup(ctx, inputs, output):
    *operands, plan, ctx.sharding = inputs
    ctx.save_for_backward(*operands, *plan)


def _combine_vjp(ctx, dout):
    rows, weights, *plan = ctx.saved_tensors
    drows, dweights = _combine_backward(dout, rows, weights, plan, ctx.sharding)
    return drows, dweights, [None] * len(plan), None


def _combine_backward_vjp(ctx, ddrows, ddweights):
    # <ddrows, drows> + <ddweights, dweights> is bilinear in dout and (rows, weights), so its
    # gradients are combines and combine_backwards with the cotangents in the operands' places.
    dout, rows, weights, *plan = ctx.saved_tensors
    ddout = _combine(ddrows, weights, plan, ctx.sharding)
    ddout = ddout + _combine(rows, ddweights, plan, ctx.sharding)
    drows, dweights = _combine_backward(dout, ddrows, ddweights, plan, ctx.sharding)
    return ddout, drows, dweights, [None] * len(plan), None


_combine.register_autograd(_combine_vjp, setup_context=_combine_setup)
_combine_backward.register_autograd(_combine_backward_vjp, setup_context=_combine_setup)
