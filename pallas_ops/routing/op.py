"""routing_plan: the permutation that sorts routed slots by expert, found without a sort."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pallas_ops.checks import check_int32, check_rank, check_row_shards
from pallas_ops.routing import reference
from pallas_ops.routing.blocks import BLOCK, check_block
from pallas_ops.routing.limits import why_no_kernel
from pallas_ops.sharding import OpSharding, decode, encode, num_row_shards


class WindowTables(NamedTuple):
    """What the kernels of permute and combine read instead of a permutation of R entries: prefix
    sums of each block of C tokens, see pallas_ops/routing/windows.py for what they mean.

    int32. nb = ceil(T / C) blocks; with n row shards each table is those of the shards, one after
    the other.
    """

    bounds: Tensor
    """[nb + 1, E] first row of an expert that belongs to a block or a later one."""
    shift: Tensor
    """[nb, E] from a row's number to its place in the buffer of its block."""
    position: Tensor
    """[nb * C, K] place of every slot in that buffer."""
    ring: Tensor
    """[nb * C, K] place of every slot in the ring of buffers that combine reads."""
    fetch: Tensor
    """[nb, 3, E] what combine copies into a block's buffer."""

    @property
    def block(self) -> int:
        """C."""
        return self.position.shape[0] // self.shift.shape[0]


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
    """int32 [T * K]: its inverse. In a compiled graph it costs nothing unless it is read."""
    windows: WindowTables | None = None
    """What kernels read; None for a plan that permute and combine follow by gathers."""

    def operands(self, op: str, rows: Tensor, sharding: OpSharding | None) -> list[Tensor]:
        """The tensors of this plan that `permute` and `combine` work from, for their ops.

        Raises ValueError if it was made with another number of row shards, or for the kernels and
        they do not take these `rows` [., D].
        """
        planned = "one device" if self.group_sizes.ndim == 1 else f"{len(self.group_sizes)} shards"
        called = "one device" if sharding is None else f"{sharding.num_row_shards} shards"
        if planned != called:
            raise ValueError(
                f"{op}: the plan is of {planned} but the call of {called}; pass the sharding that "
                "the plan was made with"
            )
        if self.windows is None:
            return [self.row_of_slot, self.slot_of_row]
        top_k, num_experts = self.row_of_slot.shape[1], self.group_sizes.shape[-1]
        reason = why_no_kernel(rows.shape[1], rows.dtype, top_k, num_experts, self.windows.block)
        if reason is not None:
            raise ValueError(
                f"{op}: no kernel for this plan: {reason}, or make the plan with "
                "implementation='gather'"
            )
        return list(self.windows)


def routing_plan(
    expert_ids: Tensor,
    num_experts: int,
    *,
    implementation: Literal["gather", "kernel"] = "gather",
    block: int = BLOCK,
    sharding: OpSharding | None = None,
) -> RoutingPlan:
    """Plan the dispatch of each token to its K experts, by counting instead of sorting.

    A slot's row is its expert's first row plus the number of earlier slots of that expert; both
    come from one-hot counts and prefix sums in int32, a block of slots at a time. The result is
    that of a stable argsort, which on TPU would be a full comparator sort.

    Args:
        expert_ids: int32 [T, K], ids in [0, num_experts).
        num_experts: E.
        implementation: how permute and combine follow this plan: "gather", row by row in plain XLA,
            for any width and dtype; or "kernel", block by block in Pallas, for bf16 rows whose
            width is a multiple of 128. CPU tensors take the reference either way.
        block: tokens that a kernel works on at a time.
        sharding: layout on the mesh, None on one device.

    Raises:
        ValueError: wrong rank or dtype, num_experts < 1, another implementation, a block that is no
            multiple of 8 or too large, tokens that the mesh does not divide; for CPU tensors also
            ids out of range.
    """
    check_rank("routing_plan", "expert_ids", expert_ids, "T, K")
    check_int32("routing_plan", expert_ids=expert_ids)
    if num_experts < 1:
        raise ValueError(f"routing_plan: num_experts is {num_experts}; it must be at least 1")
    check_row_shards("routing_plan", "expert_ids", expert_ids.shape[0], sharding)
    plan = RoutingPlan(*_routing_plan(expert_ids, num_experts, encode(sharding)))
    if implementation == "gather":
        return plan
    if implementation != "kernel":
        raise ValueError(
            f"routing_plan: implementation is {implementation!r}; use 'gather' or 'kernel'"
        )
    check_block(block, expert_ids.shape[1], num_experts)
    if not expert_ids.numel():
        raise ValueError(
            f"routing_plan: expert_ids has shape {list(expert_ids.shape)}; kernels need a token, "
            "use implementation='gather'"
        )
    tables = WindowTables(*_routing_windows(expert_ids, num_experts, block, encode(sharding)))
    # The tables have counted already; what the plan counted is then never computed.
    bounds = tables.bounds.unflatten(0, (num_row_shards(sharding), -1))
    sizes = bounds[:, -1] - bounds[:, 0]
    return plan._replace(group_sizes=sizes if sharding else sizes[0], windows=tables)


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


@torch.library.custom_op("pallas_ops::routing_windows", mutates_args=(), device_types="cpu")
def _routing_windows(
    expert_ids: Tensor, num_experts: int, block: int, sharding: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from pallas_ops.routing import reference_windows

    num_shards = num_row_shards(decode(sharding))
    return reference_windows.routing_windows(
        expert_ids, num_experts, num_shards=num_shards, block=block
    )


@_routing_windows.register_kernel("xla")
def _(expert_ids, num_experts, block, sharding):
    from pallas_ops import bridge
    from pallas_ops.routing import kernel

    static, layout = {"num_experts": num_experts, "block": block}, decode(sharding)
    if layout is None:
        return bridge.call(kernel.window_tables, (expert_ids,), static=static)
    rows = layout.row_spec(2)
    return bridge.call(
        kernel.window_tables,
        (expert_ids,),
        static=static,
        sharding=layout,
        in_specs=(rows,),
        out_specs=(rows, rows, rows, rows, layout.row_spec(3)),
    )


@_routing_windows.register_fake
def _(expert_ids, num_experts, block, sharding):
    num_shards = num_row_shards(decode(sharding))
    num_tokens, top_k = expert_ids.shape
    num_blocks = -(-(num_tokens // num_shards) // block)
    slots = (num_shards * num_blocks * block, top_k)
    return (
        expert_ids.new_empty(num_shards * (num_blocks + 1), num_experts),
        expert_ids.new_empty(num_shards * num_blocks, num_experts),
        expert_ids.new_empty(slots),
        expert_ids.new_empty(slots),
        expert_ids.new_empty(num_shards * num_blocks, 3, num_experts),
    )
