"""Routing plan by counting, in plain torch: a counting sort whose one-hot table is never whole."""

import torch
from torch import Tensor


def routing_plan(
    expert_ids: Tensor, num_experts: int, *, num_shards: int = 1, block: int = 1024
) -> tuple[Tensor, Tensor, Tensor]:
    """Sizes [n, E], row of slot [T, K] and slot of row [T*K], for n equal shards of the tokens.

    Only `block` columns of the one-hot table [E, T*K / n] exist at a time.

    Raises:
        ValueError: an expert id outside [0, num_experts).
    """
    flat = expert_ids.reshape(num_shards, -1)  # [n, R/n], slots in token-major order
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < num_experts:
        raise ValueError(
            f"routing_plan: expert_ids span {int(flat.min())} to {int(flat.max())}; "
            f"ids must lie in [0, {num_experts}), check num_experts"
        )
    sizes, rows, slots = zip(*(_one_shard(ids, num_experts, block) for ids in flat), strict=True)
    return torch.stack(sizes), torch.cat(rows).view(expert_ids.shape), torch.cat(slots)


def _one_shard(ids: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    experts = torch.arange(num_experts, dtype=torch.int32)[:, None]
    seen = torch.zeros(num_experts, 1, dtype=torch.int32)  # rows of each expert in earlier blocks
    rows = torch.empty_like(ids)
    for chunk, out in zip(ids.split(block), rows.split(block), strict=True):
        hit = chunk == experts  # [E, block]
        # A slot's rank inside its expert: hits before it in this block, plus those seen earlier.
        rank = hit.cumsum(1, dtype=torch.int32) - 1 + seen
        torch.sum(rank * hit, 0, dtype=torch.int32, out=out)
        seen += hit.sum(1, keepdim=True, dtype=torch.int32)
    sizes = seen[:, 0]
    starts = sizes.cumsum(0, dtype=torch.int32) - sizes
    rows += starts[ids]
    slots = torch.empty_like(ids)
    slots[rows] = torch.arange(ids.numel(), dtype=torch.int32)
    return sizes, rows, slots
