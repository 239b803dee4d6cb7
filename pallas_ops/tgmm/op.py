"""tgmm: one matrix a group, the sum of its rows' outer products."""

import torch
from torch import Tensor

from pallas_ops.checks import (
    check_float,
    check_float_dtype,
    check_group_sizes,
    check_one_device,
    check_rank,
    check_row_shards,
)
from pallas_ops.sharding import OpSharding, decode, encode
from pallas_ops.tgmm import reference


def tgmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    group_offset: int = 0,
    num_groups: int | None = None,
    out_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    sharding: OpSharding | None = None,
) -> Tensor:
    """out[g] = lhs_g^T @ rhs_g over the rows of group g: the weight gradient of `gmm`.

    Differentiable in `lhs` and `rhs`, any number of times. Empty groups give exact zeros; rows
    past sum(group_sizes) are never read and get zero gradients.

    Args:
        lhs: [R, K], any float dtype.
        rhs: [R, N] of lhs.dtype.
        group_sizes: int32 [G], or [n, G] with `sharding`: one row for each of the n row shards.
        group_offset: the first group wanted; rows of the groups before it are not read.
        num_groups: how many groups from there, all that follow by default.
        out_dtype: dtype of the result, lhs.dtype by default; accumulation is fp32 at least.
        reduce_dtype: dtype in which the row shards' results are summed.
        sharding: layout on the mesh, None on one device.

    Returns:
        [num_groups, K, N] of out_dtype, summed over the row shards.

    Raises:
        ValueError: wrong rank, dtype or device, row counts that differ, rows that the mesh does not
            divide, groups that there are not; for CPU tensors also negative sizes or sizes beyond
            R.
    """
    check_one_device("tgmm", lhs=lhs, rhs=rhs, group_sizes=group_sizes)
    check_float("tgmm", lhs=lhs, rhs=rhs)
    out_dtype = out_dtype or lhs.dtype
    check_float_dtype("tgmm", out_dtype=out_dtype, reduce_dtype=reduce_dtype)
    check_rank("tgmm", "lhs", lhs, "R, K")
    check_rank("tgmm", "rhs", rhs, "R, N")
    if lhs.dtype != rhs.dtype:
        raise ValueError(f"tgmm: lhs is {lhs.dtype} but rhs is {rhs.dtype}; cast one of them")
    if lhs.shape[0] != rhs.shape[0]:
        raise ValueError(
            f"tgmm: lhs has {lhs.shape[0]} rows but rhs has {rhs.shape[0]}; pass the same R rows"
        )
    check_group_sizes("tgmm", group_sizes, None, sharding)
    check_row_shards("tgmm", "lhs", lhs.shape[0], sharding)
    all_groups = group_sizes.shape[-1]
    if num_groups is None:
        num_groups = all_groups - group_offset
    if group_offset < 0 or num_groups < 1 or group_offset + num_groups > all_groups:
        raise ValueError(
            f"tgmm: group_offset={group_offset} and num_groups={num_groups} ask for groups that "
            f"are not among the {all_groups} of group_sizes; pass the sizes of all groups and a "
            "range of at least one of them"
        )
    return _tgmm(
        lhs, rhs, group_sizes, out_dtype, reduce_dtype, encode(sharding), group_offset, num_groups
    )


@torch.library.custom_op("pallas_ops::tgmm", mutates_args=(), device_types="cpu")
def _tgmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    out_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    sharding: str,
    group_offset: int = 0,
    num_groups: int | None = None,
) -> Tensor:
    return reference.tgmm(
        lhs,
        rhs,
        group_sizes,
        groups=_groups(group_sizes, group_offset, num_groups),
        out_dtype=out_dtype,
        reduce_dtype=reduce_dtype,
    )


def _groups(group_sizes: Tensor, group_offset: int, num_groups: int | None) -> slice:
    num_groups = group_sizes.shape[-1] - group_offset if num_groups is None else num_groups
    return slice(group_offset, group_offset + num_groups)


@_tgmm.register_kernel("xla")
def _(lhs, rhs, group_sizes, out_dtype, reduce_dtype, sharding, group_offset=0, num_groups=None):
    from pallas_ops import bridge
    from pallas_ops.tgmm import kernel

    operands, layout = (lhs, rhs, group_sizes), decode(sharding)
    static = {
        "out_dtype": bridge.jax_dtype(out_dtype),
        "group_offset": group_offset,
        "num_groups": num_groups,
    }
    if layout is None:
        return bridge.call(kernel.tgmm, operands, static=static)[0]
    rows = layout.row_spec(2)
    static |= {
        "reduce_dtype": bridge.jax_dtype(reduce_dtype),
        "row_axes": layout.row_axes,
        "weight_axis": layout.weight_axis,
        "weight_dim": layout.weight_dim,
    }
    return bridge.call(
        kernel.tgmm_sharded,
        operands,
        static=static,
        sharding=layout,
        in_specs=(rows, rows, rows),
        out_specs=(layout.weight_spec,),
    )[0]


@_tgmm.register_fake
def _(lhs, rhs, group_sizes, out_dtype, reduce_dtype, sharding, group_offset=0, num_groups=None):
    groups = _groups(group_sizes, group_offset, num_groups)
    return lhs.new_empty(groups.stop - groups.start, lhs.shape[1], rhs.shape[1], dtype=out_dtype)


def _setup_context(ctx, inputs, output):
    lhs, rhs, group_sizes, _, reduce_dtype, sharding, *rest = inputs
    ctx.config = reduce_dtype, sharding
    ctx.groups = _groups(group_sizes, *(rest or (0, None)))
    ctx.save_for_backward(lhs, rhs, group_sizes)


def _backward(ctx, dout):
    lhs, rhs, group_sizes = ctx.saved_tensors
    offset = ctx.groups.start
    gmm = torch.ops.pallas_ops.gmm
    dlhs = drhs = None
    if ctx.needs_input_grad[0]:
        dlhs = gmm(rhs, dout, group_sizes, True, *ctx.config, offset)
    if ctx.needs_input_grad[1]:
        drhs = gmm(lhs, dout, group_sizes, False, *ctx.config, offset)
    return dlhs, drhs, *[None] * 6


_tgmm.register_autograd(_backward, setup_context=_setup_context)
