"""routing_plan: the permutation that sorts routed slots by expert, found without a sort."""

from typing import NamedTuple

import torch
from torch import Tensor

from pallas_ops.checks import check_int32, check_rank, check_row_shards
from pallas_ops.routing import reference
from pallas_ops.sharding import OpSharding, decode, encode, num_row_shards


class RoutingPlan(NamedTuple):
    """Where every routed slot (token t, choice k) goes in the expert-sorted order, and back.

    A slot is numbered t * K + k, and rows are sorted by expert, then token, then k. With n row
    shards, shard s owns T / n consecutive tokens and R / n consecutive rows, and both numberings
    start at 0 in every shard.
    """

    group_sizes: Tensor
    """int32 [E], or [n, E] with sharding: rows of each expert."""
    row_of_slot: Tensor
    """int32 [T, K]: row of token t's choice k."""
    slot_of_row: Tensor
    """int32 [T * K]: its inverse."""


def routing_plan(
    expert_ids: Tensor, num_experts: int, *, sharding: OpSharding | None = None
) -> RoutingPlan:
    """Plan the dispatch of each token to its K experts, by counting instead of sorting.

    A slot's row is its expert's first row plus the number of earlier slots of that expert; both
    come from one-hot counts and prefix sums in int32, a block of slots at a time. The result is
    that of a stable argsort, which on TPU would be a full comparator sort.

    Args:
        expert_ids: int32 [T, K], ids in [0, num_experts).
        num_experts: E.
        sharding: layout on the mesh, None on one device.

    Raises:
        ValueError: wrong rank or dtype, num_experts < 1, tokens that the mesh does not divide; for
            CPU tensors also ids out of range.
    """
    check_rank("routing_plan", "expert_ids", expert_ids, "T, K")
    check_int32("routing_plan", expert_ids=expert_ids)
    if num_experts < 1:
        raise ValueError(f"routing_plan: num_experts is {num_experts}; it must be at least 1")
    check_row_shards("routing_plan", "expert_ids", expert_ids.shape[0], sharding)
    return RoutingPlan(*_routing_plan(expert_ids, num_experts, encode(sharding)))


@torch.library.custom_op("pallas_ops::routing_plan", mutates_args=(), device_types="cpu")
def _routing_plan(
    expert_ids: Tensor, num_experts: int, sharding: str
) -> tuple[Tensor, Tensor, Tensor]:
    num_shards = num_row_shards(decode(sharding))
    sizes, rows, slots = reference.routing_plan(expert_ids, num_experts, num_shards=num_shards)
    return (sizes if sharding else sizes[0]), rows, slots


@_routing_plan.register_kernel("xla")
def _(expert_ids, num_experts, sharding):
    from pallas_ops import bridge
    from pallas_ops.routing import kernel

    static, layout = {"num_experts": num_experts}, decode(sharding)
    if layout is None:
        return bridge.call(kernel.routing_plan, (expert_ids,), static=static)
    rows = layout.row_spec(2)
    return bridge.call(
        kernel.routing_plan_sharded,
        (expert_ids,),
        static=static,
        sharding=layout,
        in_specs=(rows,),
        out_specs=(rows, rows, layout.row_spec(1)),
    )


@_routing_plan.register_fake
def _(expert_ids, num_experts, sharding):
    lead = [decode(sharding).num_row_shards] if sharding else []
    return (
        expert_ids.new_empty(*lead, num_experts),
        expert_ids.new_empty(expert_ids.shape),
        expert_ids.new_empty(expert_ids.numel()),
    )
