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


def gmm(lhs: Tensor, rhs: Tensor, group_sizes: Tensor, *, transpose_rhs: bool) -> Tensor:
    """[R, K] x [G, K, N] -> [R, N]; see `pallas_ops.gmm.op.gmm`.

    Every row is written exactly once, by its group's product or by the zeros of the tail, so the
    output starts uninitialised and a NaN in a tail row of `lhs` is never read.
    """
    num_cols = rhs.shape[1 if transpose_rhs else 2]
    out = lhs.new_empty(lhs.shape[0], num_cols)
    groups, tails = group_rows(group_sizes, lhs.shape[0])
    for shard in groups:
        for weight, rows in zip(rhs, shard, strict=True):
            if rows.start == rows.stop:
                continue
            weight = weight.to(lhs.dtype)
            if transpose_rhs and rows.stop - rows.start <= _FEW_ROWS:
                out[rows] = torch.mm(weight, lhs[rows].t()).t()
            else:
                torch.mm(lhs[rows], weight.t() if transpose_rhs else weight, out=out[rows])
    for rows in tails:
        out[rows].zero_()
    return out
