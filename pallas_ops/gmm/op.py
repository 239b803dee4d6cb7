"""gmm: every row times the matrix of its group."""

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
from pallas_ops.gmm import reference
from pallas_ops.sharding import OpSharding, decode, encode


def gmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    transpose_rhs: bool = False,
    reduce_dtype: torch.dtype = torch.float32,
    sharding: OpSharding | None = None,
) -> Tensor:
    """out[r] = lhs[r] @ rhs[g(r)], where group g(r) owns row r by the running sum of `group_sizes`.

    Differentiable in `lhs` and `rhs`, any number of times. Rows past sum(group_sizes) are exactly
    zero, forward and in the gradient of `lhs`, and are never read: NaN there reaches nothing.

    Args:
        lhs: [R, K], any float dtype; products accumulate in fp32 (fp64 for fp64).
        rhs: [G, K, N], or [G, N, K] with `transpose_rhs`; cast to lhs.dtype inside, so fp32 master
            weights go in as they are.
        group_sizes: int32 [G], or [n, G] with `sharding`: one row for each of the n row shards.
        transpose_rhs: contract the last dimension of `rhs`, without a transposed copy.
        reduce_dtype: dtype in which the gradient of `rhs` is summed over the mesh.
        sharding: layout on the mesh, None on one device.

    Returns:
        [R, N] of lhs.dtype. The gradient of `rhs` has rhs.dtype, is accumulated in fp32 and is
        exactly zero for empty groups.

    Raises:
        ValueError: wrong rank, dtype or device, K or group count that differ, rows or weights that
            the mesh does not divide; for CPU tensors also negative sizes or sizes beyond R.
    """
    check_one_device("gmm", lhs=lhs, rhs=rhs, group_sizes=group_sizes)
    check_float("gmm", lhs=lhs, rhs=rhs)
    check_float_dtype("gmm", reduce_dtype=reduce_dtype)
    check_rank("gmm", "lhs", lhs, "R, K")
    check_rank("gmm", "rhs", rhs, "G, N, K" if transpose_rhs else "G, K, N")
    inner = rhs.shape[2 if transpose_rhs else 1]
    if inner != lhs.shape[1]:
        raise ValueError(
            f"gmm: lhs has K={lhs.shape[1]} but rhs of shape {list(rhs.shape)} has K={inner} with "
            f"transpose_rhs={transpose_rhs}; check transpose_rhs, or pass matching operands"
        )
    check_group_sizes("gmm", group_sizes, rhs.shape[0], sharding)
    check_row_shards("gmm", "lhs", lhs.shape[0], sharding)
    if sharding is not None and sharding.weight_dim is not None:
        size = rhs.shape[sharding.weight_dim]
        if size % sharding.num_weight_shards:
            raise ValueError(
                f"gmm: dim {sharding.weight_dim} of rhs has size {size}, which axis "
                f"{sharding.weight_axis!r} of size {sharding.num_weight_shards} does not divide; "
                "choose another weight_dim, or None"
            )
    return _gmm(lhs, rhs, group_sizes, transpose_rhs, reduce_dtype, encode(sharding))


@torch.library.custom_op("pallas_ops::gmm", mutates_args=(), device_types="cpu")
def _gmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    transpose_rhs: bool,
    reduce_dtype: torch.dtype,
    sharding: str,
) -> Tensor:
    return reference.gmm(lhs, rhs, group_sizes, transpose_rhs=transpose_rhs)


@_gmm.register_kernel("xla")
def _(lhs, rhs, group_sizes, transpose_rhs, reduce_dtype, sharding):
    from pallas_ops import bridge
    from pallas_ops.gmm import kernel

    operands, static = (lhs, rhs, group_sizes), {"transpose_rhs": transpose_rhs}
    layout = decode(sharding)
    if layout is None:
        return bridge.call(kernel.gmm, operands, static=static)[0]
    rows = layout.row_spec(2)
    return bridge.call(
        kernel.gmm_sharded,
        operands,
        static=static | {"weight_axis": layout.weight_axis, "weight_dim": layout.weight_dim},
        sharding=layout,
        in_specs=(rows, layout.weight_spec, rows),
        out_specs=(rows,),
    )[0]


@_gmm.register_fake
def _(lhs, rhs, group_sizes, transpose_rhs, reduce_dtype, sharding):
    return lhs.new_empty(lhs.shape[0], rhs.shape[1 if transpose_rhs else 2])


def _setup_context(ctx, inputs, output):
    lhs, rhs, group_sizes, *ctx.config = inputs
    ctx.save_for_backward(lhs, rhs, group_sizes)


def _backward(ctx, dout):
    lhs, rhs, group_sizes = ctx.saved_tensors
    transpose_rhs, reduce_dtype, sharding = ctx.config
    dlhs = drhs = None
    if ctx.needs_input_grad[0]:
        dlhs = _gmm(dout, rhs, group_sizes, not transpose_rhs, reduce_dtype, sharding)
    if ctx.needs_input_grad[1]:
        left, right = (dout, lhs) if transpose_rhs else (lhs, dout)
        drhs = torch.ops.pallas_ops.tgmm(
            left, right, group_sizes, rhs.dtype, reduce_dtype, sharding
        )
    return dlhs, drhs, None, None, None, None


_gmm.register_autograd(_backward, setup_context=_setup_context)
