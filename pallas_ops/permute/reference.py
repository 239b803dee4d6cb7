"""Permute and its transpose in plain torch; shards of tokens and rows are independent."""

import torch
from torch import Tensor


def permute(x: Tensor, slot_of_row: Tensor, *, top_k: int, num_shards: int) -> Tensor:
    """[T, D] -> [R, D]: row r is the token of slot `slot_of_row[r]`."""
    tokens = global_index(slot_of_row // top_k, x.shape[0], num_shards)
    return x.index_select(0, tokens)


def unpermute(rows: Tensor, row_of_slot: Tensor, *, num_shards: int) -> Tensor:
    """[R, D] -> [T, D]: token t is the sum of its K rows, in fp32 at least, rounded once."""
    index = global_index(row_of_slot, rows.shape[0], num_shards)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    total = rows.new_zeros(row_of_slot.shape[0], rows.shape[1], dtype=dtype)
    for choice in index.unbind(1):
        total += rows.index_select(0, choice)
    return total.to(rows.dtype)


def global_index(index: Tensor, size: int, num_shards: int) -> Tensor:
    """Turn shard-local numbers into positions in a dimension of `size` split into equal shards."""
    if num_shards == 1:
        return index
    starts = torch.arange(num_shards, dtype=index.dtype) * (size // num_shards)
    return (index.view(num_shards, -1) + starts[:, None]).view(index.shape)
