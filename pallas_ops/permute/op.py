"""permute: copy every token to the rows of its experts. unpermute: its transpose."""

import torch
from torch import Tensor

from pallas_ops.checks import check_float, check_one_device, check_rank, check_row_shards
from pallas_ops.permute import reference
from pallas_ops.routing import reference_windows
from pallas_ops.routing.op import RoutingPlan
from pallas_ops.sharding import OpSharding, decode, encode, num_row_shards


def permute(x: Tensor, plan: RoutingPlan, *, sharding: OpSharding | None = None) -> Tensor:
    """out[r] = x[slot_of_row[r] // K]: a bit-exact copy of each token for each of its K experts.

    Differentiable any number of times: the gradient of `x` is the sum of a token's K rows, in fp32
    at least and rounded once.

    Args:
        x: [T, D], any float dtype.
        plan: the routing of the same T tokens.
        sharding: layout on the mesh, None on one device; the one `plan` was made with.

    Returns:
        [T * K, D] of x.dtype.

    Raises:
        ValueError: wrong rank, dtype or device, a plan for another number of tokens or of
            row shards, tokens that the mesh does not divide, x that the kernels do not take with a
            plan made for them.
    """
    check_one_device("permute", x=x, plan=plan.row_of_slot)
    check_float("permute", x=x)
    check_rank("permute", "x", x, "T, D")
    if x.shape[0] != plan.row_of_slot.shape[0]:
        raise ValueError(
            f"permute: x has {x.shape[0]} tokens but plan has {plan.row_of_slot.shape[0]}; "
            "pass the plan made from these tokens' expert ids"
        )
    check_row_shards("permute", "x", x.shape[0], sharding)
    return _permute(x, plan.operands("permute", x, sharding), encode(sharding))


def slots(plan: list[Tensor], num_tokens: int, num_shards: int) -> tuple[Tensor, Tensor]:
    """row_of_slot and slot_of_row of `RoutingPlan.operands`, on the CPU."""
    if len(plan) == 2:
        return plan[0], plan[1]
    return reference_windows.slots(*plan[:3], num_tokens, num_shards=num_shards)


def num_choices(plan: list[Tensor]) -> int:
    """K of `RoutingPlan.operands`."""
    return plan[0 if len(plan) == 2 else 2].shape[1]


@torch.library.custom_op("pallas_ops::permute", mutates_args=(), device_types="cpu")
def _permute(x: Tensor, plan: list[Tensor], sharding: str) -> Tensor:
    num_shards = num_row_shards(decode(sharding))
    row_of_slot, slot_of_row = slots(plan, x.shape[0], num_shards)
    top_k = row_of_slot.shape[1]
    return reference.permute(x, slot_of_row, top_k=top_k, num_shards=num_shards)


@_permute.register_kernel("xla")
def _(x, plan, sharding):
    from pallas_ops import bridge
    from pallas_ops.permute import kernel

    fn = kernel.permute if len(plan) == 2 else kernel.permute_windows
    return bridge.call_by_rows(fn, (x, *plan), decode(sharding), num_outputs=1)[0]


@_permute.register_fake
def _(x, plan, sharding):
    return x.new_empty(x.shape[0] * num_choices(plan), x.shape[1])


@torch.library.custom_op("pallas_ops::unpermute", mutates_args=(), device_types="cpu")
def _unpermute(rows: Tensor, plan: list[Tensor], sharding: str) -> Tensor:
    num_shards = num_row_shards(decode(sharding))
    row_of_slot, _ = slots(plan, rows.shape[0] // num_choices(plan), num_shards)
    return reference.unpermute(rows, row_of_slot, num_shards=num_shards)


@_unpermute.register_kernel("xla")
def _(rows, plan, sharding):
    from pallas_ops import bridge
    from pallas_ops.permute import kernel

    fn = kernel.unpermute if len(plan) == 2 else kernel.unpermute_windows
    return bridge.call_by_rows(fn, (rows, *plan), decode(sharding), num_outputs=1)[0]


@_unpermute.register_fake
def _(rows, plan, sharding):
    return rows.new_empty(rows.shape[0] // num_choices(plan), rows.shape[1])


def _setup_context(ctx, inputs, output):
    _, plan, ctx.sharding = inputs
    ctx.save_for_backward(*plan)


# Each op is the transpose of the other.
_permute.register_autograd(
    lambda ctx, drows: (
        _unpermute(drows, list(ctx.saved_tensors), ctx.sharding),
        [None] * len(ctx.saved_tensors),
        None,
    ),
    setup_context=_setup_context,
)
_unpermute.register_autograd(
    lambda ctx, dx: (
        _permute(dx, list(ctx.saved_tensors), ctx.sharding),
        [None] * len(ctx.saved_tensors),
        None,
    ),
    setup_context=_setup_context,
)
