"""The window tables in plain torch, from their definition, and the way back to rows."""

import torch
from torch import Tensor

from pallas_ops.permute.reference import global_index
from pallas_ops.routing import reference
from pallas_ops.routing.blocks import GRANULE, RING, buffer_rows


def routing_windows(
    expert_ids: Tensor, num_experts: int, *, num_shards: int = 1, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """bounds, shift, position, ring and fetch of `WindowTables`, shard after shard.

    Raises:
        ValueError: an expert id outside [0, num_experts).
    """
    _, rows, _ = reference.routing_plan(expert_ids, num_experts, num_shards=num_shards)
    shards = zip(expert_ids.chunk(num_shards), rows.chunk(num_shards), strict=True)
    tables = zip(*(_one_shard(*shard, num_experts, block) for shard in shards), strict=True)
    return tuple(torch.cat(table) for table in tables)


def _one_shard(ids: Tensor, rows: Tensor, num_experts: int, block: int) -> tuple[Tensor, ...]:
    num_tokens, top_k = ids.shape
    experts = torch.arange(num_experts, dtype=torch.int32)
    counts = [(part[..., None] == experts).sum((0, 1)).int() for part in ids.split(block)]
    counts = torch.stack([torch.zeros_like(experts), *counts] if num_tokens else [experts * 0])
    before = counts.cumsum(0, dtype=torch.int32)
    bounds = before + before[-1].cumsum(0, dtype=torch.int32) - before[-1]

    num_blocks = len(bounds) - 1
    buffer = buffer_rows(block, top_k, num_experts)
    shift = torch.zeros(num_blocks, num_experts, dtype=torch.int32)
    fetch = torch.zeros(num_blocks, 3, num_experts, dtype=torch.int32)
    position = torch.zeros(num_blocks * block, top_k, dtype=torch.int32)
    ring = torch.zeros_like(position)
    home = None  # [G]: what to add to a row number for its place in the ring
    for b, part in enumerate(ids.split(block)):
        first_row, end_row = bounds[b], bounds[b + 1]
        used = end_row > first_row
        first = first_row // GRANULE
        length = (-(-end_row // GRANULE) - first) * used
        held = (bounds[max(b - 1, 0)] <= first * GRANULE) & (first * GRANULE < first_row)
        fetched = length - (held & used).int()
        place = fetched.cumsum(0, dtype=torch.int32) - fetched
        shift[b] = ((length.cumsum(0) - length - first) * GRANULE).int() * used
        fetch[b] = torch.stack([first + held.int(), place, fetched])
        before_home = home
        home = b % RING * buffer + (place - first - held.int()) * GRANULE
        row, expert = rows[b * block : b * block + len(part)], part.long()
        position[b * block : b * block + len(part)] = row + shift[b][expert]
        at = row + home[expert]
        if b:
            is_held = held[expert] & (row // GRANULE == first[expert])
            at = torch.where(is_held, row + before_home[expert], at)
        ring[b * block : b * block + len(part)] = at
    return bounds, shift, position, ring, fetch


def slots(
    bounds: Tensor, shift: Tensor, position: Tensor, num_tokens: int, *, num_shards: int = 1
) -> tuple[Tensor, Tensor]:
    """row_of_slot [T, K] and slot_of_row [T * K] of a `RoutingPlan` from its window tables."""
    found = []
    for own in zip(*(t.chunk(num_shards) for t in (bounds, shift, position)), strict=True):
        found.append(_rows(*own, num_tokens // num_shards))
    rows = torch.cat(found)
    numbers = torch.arange(rows.numel(), dtype=torch.int32) % (rows.numel() // num_shards)
    slot_of_row = torch.empty_like(numbers)
    slot_of_row[global_index(rows, rows.numel(), num_shards).flatten().long()] = numbers
    return rows, slot_of_row


def _rows(bounds: Tensor, shift: Tensor, position: Tensor, num_tokens: int) -> Tensor:
    top_k = position.shape[1]
    if not num_tokens:
        return position.new_zeros(0, top_k)
    used = bounds[1:] > bounds[:-1]
    begin = torch.where(used, bounds[:-1] // GRANULE * GRANULE + shift, 2**31 - 1)
    # The window of a place is the last that begins at or before it.
    own = (position.view(len(shift), -1, 1) >= begin[:, None]).int()  # [nb, C * K, G]
    experts = torch.arange(shift.shape[1])
    window = torch.where(own.bool(), experts, -1).amax(2)
    rows = position.view(len(shift), -1) - shift.gather(1, window.clamp(min=0))
    return rows.reshape(-1, top_k)[:num_tokens]
