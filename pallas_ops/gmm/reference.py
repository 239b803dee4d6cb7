"""Grouped matrix product in plain torch: what the kernel must equal, and the CPU implementation."""

import torch
from torch import Tensor

_FEW_ROWS = 64
"""Up to this many rows W @ x^T, with the few columns packed, beats x @ W^T, which packs W."""


def group_rows(group_sizes: Tensor, num_rows: int) -> tuple[list[list[slice]], list[slice]]:
    """Rows of every group and rows of none.

    Args:
        group_sizes: int32 [G], or [n, G] when the rows are n equal shards, each sorted by group.
        num_rows: R, over all shards.

    Returns:
        `groups[shard][g]`, the rows of group g in that shard, and `tails[shard]`, the rows after
        the shard's last group. Together they cover [0, R) once.

    Raises:
        ValueError: a negative size, or sizes that need more rows than a shard has.
    """
    sizes_of_shards = group_sizes.reshape(-1, group_sizes.shape[-1]).tolist()
    shard_rows = num_rows // len(sizes_of_shards)
    groups, tails = [], []
    for shard, sizes in enumerate(sizes_of_shards):
        if min(sizes, default=0) < 0:
            raise ValueError(f"group_sizes holds {min(sizes)}; sizes must not be negative")
        if sum(sizes) > shard_rows:
            raise ValueError(
                f"group_sizes sum to {sum(sizes)} but there are {shard_rows} rows (shard {shard}); "
                "sizes count rows of lhs, so their sum must not exceed them"
            )
        start, rows = shard * shard_rows, []
        for size in sizes:
            rows.append(slice(start, start + size))
            start += size
        groups.append(rows)
        tails.append(slice(start, (shard + 1) * shard_rows))
    return groups, tails


def gmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    transpose_rhs: bool,
    group_offset: int = 0,
    partial_sum: Tensor | None = None,
) -> Tensor:
    """[R, K] x [G, K, N] -> [R, N]; see `pallas_ops.gmm.op.gmm`.

    Only rows of the call's groups are read, so a NaN in another row of `lhs` reaches nothing.
    """
    num_cols = rhs.shape[1 if transpose_rhs else 2]
    if partial_sum is None:
        out = lhs.new_zeros(lhs.shape[0], num_cols)
    else:
        out = partial_sum.clone(memory_format=torch.contiguous_format)
    groups, _ = group_rows(group_sizes, lhs.shape[0])
    for shard in groups:
        own = shard[group_offset : group_offset + rhs.shape[0]]
        for weight, rows in zip(rhs, own, strict=True):
            if rows.start == rows.stop:
                continue
            weight = weight.to(lhs.dtype)
            if transpose_rhs and rows.stop - rows.start <= _FEW_ROWS:
                out[rows] = torch.mm(weight, lhs[rows].t()).t()
            else:
                torch.mm(lhs[rows], weight.t() if transpose_rhs else weight, out=out[rows])
    return out


def other_rows(group_sizes: Tensor, num_rows: int, group_offset: int, num_groups: int) -> Tensor:
    """bool [R]: whether a row is of none of the groups [group_offset, group_offset + num_groups).

    `group_sizes` int32 [G] or [n, G] as in `group_rows`, on any device.
    """
    sizes = group_sizes.reshape(-1, group_sizes.shape[-1])
    start = sizes[:, :group_offset].sum(1, keepdim=True, dtype=torch.int32)
    end = sizes[:, : group_offset + num_groups].sum(1, keepdim=True, dtype=torch.int32)
    row = torch.arange(num_rows // len(sizes), dtype=torch.int32, device=sizes.device)
    return ((row < start) | (row >= end)).reshape(-1)
