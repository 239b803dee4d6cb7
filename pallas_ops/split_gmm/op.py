"""split_gmm: `gmm` with matrices stored in two halves of groups, each gathered on its own."""

import torch
from torch import Tensor

from pallas_ops.checks import (
    check_group_sizes,
    check_product,
    check_row_shards,
    check_weight_shards,
)
from pallas_ops.sharding import OpSharding, decode, encode
from pallas_ops.split_gmm import reference


def split_gmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    transpose_rhs: bool = False,
    reduce_dtype: torch.dtype = torch.float32,
    sharding: OpSharding | None = None,
) -> Tensor:
    """`gmm(lhs, join_experts(rhs), group_sizes)`, gathering one half of the groups at a time.

    With a mesh, the product of the first half need not wait for the second half of the weight.
    Differentiable in `lhs` and `rhs`, any number of times; rows of no group as in `gmm`.

    Args:
        lhs: [R, K], any float dtype; products accumulate in fp32 (fp64 for fp64).
        rhs: [2, G, K/2, N], or [2, G, N/2, K] with `transpose_rhs`: `split_experts` of the weight.
            Cast to lhs.dtype inside.
        group_sizes: int32 [G], or [n, G] with `sharding`: one row for each of the n row shards.
        transpose_rhs: contract the last dimension of `rhs`.
        reduce_dtype: dtype in which the gradient of `rhs` is summed over the mesh.
        sharding: layout on the mesh, None on one device. Its weight_dim counts from dimension 1 of
            `rhs`: 0 is G.

    Returns:
        [R, N] of lhs.dtype. The gradient of `rhs` has its dtype and shape.

    Raises:
        ValueError: as `gmm`; for an odd G too.
    """
    letters = "2, G, N/2, K" if transpose_rhs else "2, G, K/2, N"
    check_product("split_gmm", lhs, rhs, letters, group_sizes, reduce_dtype)
    if rhs.shape[0] != 2 or rhs.shape[1] % 2:
        raise ValueError(
            f"split_gmm: rhs has shape {list(rhs.shape)}; expected 2 halves of an even number of "
            "groups, as split_experts gives"
        )
    inner = rhs.shape[3] if transpose_rhs else 2 * rhs.shape[2]
    if inner != lhs.shape[1]:
        raise ValueError(
            f"split_gmm: lhs has K={lhs.shape[1]} but rhs of shape {list(rhs.shape)} has K={inner} "
            f"with transpose_rhs={transpose_rhs}; check transpose_rhs, or pass matching operands"
        )
    check_group_sizes("split_gmm", group_sizes, rhs.shape[1], sharding)
    check_row_shards("split_gmm", "lhs", lhs.shape[0], sharding)
    check_weight_shards("split_gmm", rhs.shape[1:], sharding)
    return _split_gmm(lhs, rhs, group_sizes, transpose_rhs, reduce_dtype, encode(sharding))


@torch.library.custom_op("pallas_ops::split_gmm", mutates_args=(), device_types="cpu")
def _split_gmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    transpose_rhs: bool,
    reduce_dtype: torch.dtype,
    sharding: str,
) -> Tensor:
    return reference.split_gmm(lhs, rhs, group_sizes, transpose_rhs=transpose_rhs)


@_split_gmm.register_kernel("xla")
def _(lhs, rhs, group_sizes, transpose_rhs, reduce_dtype, sharding):
    from pallas_ops import bridge
    from pallas_ops.split_gmm import kernel

    operands, static = (lhs, rhs, group_sizes), {"transpose_rhs": transpose_rhs}
    layout = decode(sharding)
    if layout is None:
        return bridge.call(kernel.split_gmm, operands, static=static)[0]
    rows = layout.row_spec(2)
    return bridge.call(
        kernel.split_gmm_sharded,
        operands,
        static=static | {"weight_axis": layout.weight_axis, "weight_dim": layout.weight_dim},
        sharding=layout,
        in_specs=(rows, (None, *layout.weight_spec), rows),
        out_specs=(rows,),
    )[0]


@_split_gmm.register_fake
def _(lhs, rhs, group_sizes, transpose_rhs, reduce_dtype, sharding):
    return lhs.new_empty(lhs.shape[0], 2 * rhs.shape[2] if transpose_rhs else rhs.shape[3])


def _setup_context(ctx, inputs, output):
    lhs, rhs, group_sizes, *ctx.config = inputs
    ctx.save_for_backward(lhs, rhs, group_sizes)


def _backward(ctx, dout):
    lhs, rhs, group_sizes = ctx.saved_tensors
    transpose_rhs, reduce_dtype, sharding = ctx.config
    dlhs = drhs = None
    if ctx.needs_input_grad[0]:
        dlhs = _split_gmm(dout, rhs, group_sizes, not transpose_rhs, reduce_dtype, sharding)
    if ctx.needs_input_grad[1]:
        left, right = (dout, lhs) if transpose_rhs else (lhs, dout)
        drhs = _split_tgmm(left, right, group_sizes, rhs.dtype, reduce_dtype, sharding)
    return dlhs, drhs, None, None, None, None


_split_gmm.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("pallas_ops::split_tgmm", mutates_args=(), device_types="cpu")
def _split_tgmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    out_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    sharding: str,
) -> Tensor:
    return reference.split_tgmm(
        lhs, rhs, group_sizes, out_dtype=out_dtype, reduce_dtype=reduce_dtype
    )


@_split_tgmm.register_kernel("xla")
def _(lhs, rhs, group_sizes, out_dtype, reduce_dtype, sharding):
    from pallas_ops import bridge
    from pallas_ops.split_gmm import kernel

    operands, layout = (lhs, rhs, group_sizes), decode(sharding)
    static = {"out_dtype": bridge.jax_dtype(out_dtype)}
    if layout is None:
        return bridge.call(kernel.split_tgmm, operands, static=static)[0]
    rows = layout.row_spec(2)
    static |= {
        "reduce_dtype": bridge.jax_dtype(reduce_dtype),
        "row_axes": layout.row_axes,
        "weight_axis": layout.weight_axis,
        "weight_dim": layout.weight_dim,
    }
    return bridge.call(
        kernel.split_tgmm_sharded,
        operands,
        static=static,
        sharding=layout,
        in_specs=(rows, rows, rows),
        out_specs=((None, *layout.weight_spec),),
    )[0]


@_split_tgmm.register_fake
def _(lhs, rhs, group_sizes, out_dtype, reduce_dtype, sharding):
    return lhs.new_empty(
        *(2, group_sizes.shape[-1], lhs.shape[1] // 2, rhs.shape[1]), dtype=out_dtype
    )


def _tgmm_backward(ctx, dout):
    lhs, rhs, group_sizes = ctx.saved_tensors
    dlhs = drhs = None
    if ctx.needs_input_grad[0]:
        dlhs = _split_gmm(rhs, dout, group_sizes, True, *ctx.config)
    if ctx.needs_input_grad[1]:
        drhs = _split_gmm(lhs, dout, group_sizes, False, *ctx.config)
    return dlhs, drhs, None, None, None, None


def _setup_tgmm_context(ctx, inputs, output):
    lhs, rhs, group_sizes, _, *ctx.config = inputs
    ctx.save_for_backward(lhs, rhs, group_sizes)


_split_tgmm.register_autograd(_tgmm_backward, setup_context=_setup_tgmm_context)
