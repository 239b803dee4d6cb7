"""gmm: every row times the matrix of its group."""

import torch
from torch import Tensor

from pallas_ops.checks import (
    check_group_sizes,
    check_product,
    check_row_shards,
    check_weight_shards,
)
from pallas_ops.gmm import reference
from pallas_ops.sharding import OpSharding, decode, encode


def gmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    transpose_rhs: bool = False,
    group_offset: int | None = None,
    partial_sum: Tensor | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    sharding: OpSharding | None = None,
) -> Tensor:
    """out[r] = lhs[r] @ rhs[g(r)], where group g(r) owns row r by the running sum of `group_sizes`.

    Differentiable in `lhs`, `rhs` and `partial_sum`, any number of times. Rows of no group of `rhs`
    are exactly zero, or those of `partial_sum`; in the gradient of `lhs` they are zero. They are
    never read: NaN there reaches nothing.

    Args:
        lhs: [R, K], any float dtype; products accumulate in fp32 (fp64 for fp64).
        rhs: [G, K, N], or [G, N, K] with `transpose_rhs`; cast to lhs.dtype inside, so fp32 master
            weights go in as they are.
        group_sizes: int32 [G_all], or [n, G_all] with `sharding`: one row for each of the n row
            shards.
        transpose_rhs: contract the last dimension of `rhs`, without a transposed copy.
        group_offset: `rhs` holds groups [group_offset, group_offset + G) of the G_all ones; None =
            it holds all of them, and G_all must be G.
        partial_sum: [R, N] of lhs.dtype, an earlier result whose rows of other groups are kept. On
            XLA the result takes its memory when nothing else needs it.
        reduce_dtype: dtype in which the gradient of `rhs` is summed over the mesh.
        sharding: layout on the mesh, None on one device.

    Returns:
        [R, N] of lhs.dtype. The gradient of `rhs` has rhs.dtype, is accumulated in fp32 and is
        exactly zero for empty groups.

    Raises:
        ValueError: wrong rank, dtype or device, K or group count that differ, groups beyond G_all,
            rows or weights that the mesh does not divide; for CPU tensors also negative sizes or
            sizes beyond R.
    """
    kept = {} if partial_sum is None else {"partial_sum": partial_sum}
    letters = "G, N, K" if transpose_rhs else "G, K, N"
    check_product("gmm", lhs, rhs, letters, group_sizes, reduce_dtype, **kept)
    num_groups, inner = rhs.shape[0], rhs.shape[2 if transpose_rhs else 1]
    if inner != lhs.shape[1]:
        raise ValueError(
            f"gmm: lhs has K={lhs.shape[1]} but rhs of shape {list(rhs.shape)} has K={inner} with "
            f"transpose_rhs={transpose_rhs}; check transpose_rhs, or pass matching operands"
        )
    check_group_sizes("gmm", group_sizes, num_groups if group_offset is None else None, sharding)
    if group_offset is not None and not 0 <= group_offset <= group_sizes.shape[-1] - num_groups:
        raise ValueError(
            f"gmm: group_offset={group_offset} and the {num_groups} groups of rhs are outside the "
            f"{group_sizes.shape[-1]} of group_sizes; pass the sizes of all groups"
        )
    size_n = rhs.shape[1 if transpose_rhs else 2]
    expected = (lhs.shape[0], size_n), lhs.dtype
    if partial_sum is not None and (tuple(partial_sum.shape), partial_sum.dtype) != expected:
        raise ValueError(
            f"gmm: partial_sum is {partial_sum.dtype} of shape {list(partial_sum.shape)}; expected "
            f"{lhs.dtype} of shape {[lhs.shape[0], size_n]}, as the result"
        )
    check_row_shards("gmm", "lhs", lhs.shape[0], sharding)
    check_weight_shards("gmm", rhs.shape, sharding)
    return _gmm(
        *(lhs, rhs, group_sizes, transpose_rhs, reduce_dtype, encode(sharding)),
        group_offset or 0,
        partial_sum,
    )


@torch.library.custom_op("pallas_ops::gmm", mutates_args=(), device_types="cpu")
def _gmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    transpose_rhs: bool,
    reduce_dtype: torch.dtype,
    sharding: str,
    group_offset: int = 0,
    partial_sum: Tensor | None = None,
) -> Tensor:
    return reference.gmm(
        lhs,
        rhs,
        group_sizes,
        transpose_rhs=transpose_rhs,
        group_offset=group_offset,
        partial_sum=partial_sum,
    )


@_gmm.register_kernel("xla")
def _(
    lhs,
    rhs,
    group_sizes,
    transpose_rhs,
    reduce_dtype,
    sharding,
    group_offset=0,
    partial_sum=None,
):
    from pallas_ops import bridge
    from pallas_ops.gmm import kernel

    kept = () if partial_sum is None else (partial_sum,)
    operands = (lhs, rhs, group_sizes, *kept)
    static = {"transpose_rhs": transpose_rhs, "group_offset": group_offset}
    layout = decode(sharding)
    if layout is None:
        return bridge.call(kernel.gmm, operands, static=static)[0]
    rows = layout.row_spec(2)
    return bridge.call(
        kernel.gmm_sharded,
        operands,
        static=static | {"weight_axis": layout.weight_axis, "weight_dim": layout.weight_dim},
        sharding=layout,
        in_specs=(rows, layout.weight_spec, rows, *(rows for _ in kept)),
        out_specs=(rows,),
    )[0]


@_gmm.register_fake
def _(
    lhs,
    rhs,
    group_sizes,
    transpose_rhs,
    reduce_dtype,
    sharding,
    group_offset=0,
    partial_sum=None,
):
    return lhs.new_empty(lhs.shape[0], rhs.shape[1 if transpose_rhs else 2])


def _setup_context(ctx, inputs, output):
    lhs, rhs, group_sizes, *ctx.config, _ = inputs
    ctx.save_for_backward(lhs, rhs, group_sizes)


def _backward(ctx, dout):
    lhs, rhs, group_sizes = ctx.saved_tensors
    transpose_rhs, reduce_dtype, sharding, group_offset = ctx.config
    dlhs = drhs = dpartial = None
    if ctx.needs_input_grad[0]:
        dlhs = _gmm(dout, rhs, group_sizes, not transpose_rhs, reduce_dtype, sharding, group_offset)
    if ctx.needs_input_grad[1]:
        left, right = (dout, lhs) if transpose_rhs else (lhs, dout)
        drhs = torch.ops.pallas_ops.tgmm(
            *(left, right, group_sizes, rhs.dtype, reduce_dtype, sharding),
            group_offset=group_offset,
            num_groups=rhs.shape[0],
        )
    if any(ctx.needs_input_grad[7:]):  # arguments left at their defaults are not counted
        kept = reference.other_rows(group_sizes, lhs.shape[0], group_offset, rhs.shape[0])
        dpartial = torch.where(kept[:, None], dout, 0)
    return dlhs, drhs, None, None, None, None, None, dpartial


_gmm.register_autograd(_backward, setup_context=_setup_context)
