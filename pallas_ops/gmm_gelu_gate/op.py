"""gmm_gelu_gate: `gelu_gate(gmm(lhs, rhs, group_sizes, transpose_rhs=True))` in one pass.

Apart, the gate reads [R, 2F] and writes [R, F] again: as long as a third of the product, on a v6e.
Run without gradients, as a recomputed layer is at first (torch_gemma4/recompute.py), [R, 2F] is
never written. kernel.py says which shapes are not gated inside the product.
"""

import torch
from torch import Tensor

from pallas_ops.activation.op import gelu_gate_gradient
from pallas_ops.checks import (
    check_group_sizes,
    check_product,
    check_row_shards,
    check_weight_shards,
)
from pallas_ops.gmm_gelu_gate import reference
from pallas_ops.sharding import OpSharding, decode, encode


def gmm_gelu_gate(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    reduce_dtype: torch.dtype = torch.float32,
    sharding: OpSharding | None = None,
) -> Tensor:
    """gelu_tanh(x gate_g^T) * (x up_g^T) for each row x of `lhs` and its group g.

    Differentiable in `lhs` and `rhs`, any number of times. Rows of no group are zero and never
    read, as in `gmm`.

    Args:
        lhs: [R, K], any float dtype; products accumulate in fp32 (fp64 for fp64), are rounded to
            lhs.dtype, and gated in at least fp32.
        rhs: [G, 2F, K], the rows of gate, then those of up; cast to lhs.dtype inside.
        group_sizes: int32 [G], or [n, G] with `sharding`: one row for each of the n row shards.
        reduce_dtype: dtype in which the gradient of `rhs` is summed over the mesh.
        sharding: layout on the mesh, None on one device.

    Returns:
        [R, F] of lhs.dtype.

    Raises:
        ValueError: as `gmm`; for an odd number of columns too.
    """
    name = "gmm_gelu_gate"
    check_product(name, lhs, rhs, "G, 2F, K", group_sizes, reduce_dtype)
    if rhs.shape[2] != lhs.shape[1] or rhs.shape[1] % 2:
        raise ValueError(
            f"{name}: lhs has shape {list(lhs.shape)} and rhs {list(rhs.shape)}; expected rhs "
            f"[G, 2F, {lhs.shape[1]}]: as many rows of gate as of up, each as wide as lhs"
        )
    check_group_sizes(name, group_sizes, rhs.shape[0], sharding)
    check_row_shards(name, "lhs", lhs.shape[0], sharding)
    check_weight_shards(name, rhs.shape, sharding)
    keeps_product = torch.is_grad_enabled() and (lhs.requires_grad or rhs.requires_grad)
    return _gmm_gelu_gate(lhs, rhs, group_sizes, keeps_product, reduce_dtype, encode(sharding))[0]


@torch.library.custom_op("pallas_ops::gmm_gelu_gate", mutates_args=(), device_types="cpu")
def _gmm_gelu_gate(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    keeps_product: bool,
    reduce_dtype: torch.dtype,
    sharding: str,
) -> tuple[Tensor, Tensor]:
    gated, product = reference.gmm_gelu_gate(lhs, rhs, group_sizes)
    return gated, product if keeps_product else _nothing(lhs, rhs)


def _nothing(lhs: Tensor, rhs: Tensor) -> Tensor:
    return lhs.new_empty(0, rhs.shape[1])


@_gmm_gelu_gate.register_kernel("xla")
def _(lhs, rhs, group_sizes, keeps_product, reduce_dtype, sharding):
    from pallas_ops import bridge
    from pallas_ops.gmm_gelu_gate import kernel

    operands, static = (lhs, rhs, group_sizes), {"keeps_product": keeps_product}
    layout = decode(sharding)
    if layout is None:
        found = bridge.call(kernel.gmm_gelu_gate, operands, static=static)
    else:
        rows = layout.row_spec(2)
        found = bridge.call(
            kernel.gmm_gelu_gate_sharded,
            operands,
            static=static | {"weight_axis": layout.weight_axis, "weight_dim": layout.weight_dim},
            sharding=layout,
            in_specs=(rows, layout.weight_spec, rows),
            out_specs=(rows,) * (1 + keeps_product),
        )
    return found if keeps_product else (found[0], _nothing(lhs, rhs))


@_gmm_gelu_gate.register_fake
def _(lhs, rhs, group_sizes, keeps_product, reduce_dtype, sharding):
    product = lhs.new_empty(lhs.shape[0] if keeps_product else 0, rhs.shape[1])
    return lhs.new_empty(lhs.shape[0], rhs.shape[1] // 2), product


def _setup_context(ctx, inputs, output):
    lhs, rhs, group_sizes, ctx.keeps_product, *ctx.config = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else a zero [R, 2F] for it
    ctx.save_for_backward(lhs, rhs, group_sizes, output[1])


def _backward(ctx, dgated, _):
    if dgated is None:
        return (None,) * 6
    lhs, rhs, group_sizes, product = ctx.saved_tensors
    reduce_dtype, sharding = ctx.config
    gmm = torch.ops.pallas_ops.gmm
    if torch.is_grad_enabled() or not ctx.keeps_product:
        # A gradient of this gradient goes through the product.
        product = gmm(lhs, rhs, group_sizes, True, reduce_dtype, sharding)
    dproduct = gelu_gate_gradient(product, dgated)
    dlhs = drhs = None
    if ctx.needs_input_grad[0]:
        dlhs = gmm(dproduct, rhs, group_sizes, False, reduce_dtype, sharding)
    if ctx.needs_input_grad[1]:
        drhs = torch.ops.pallas_ops.tgmm(
            dproduct, lhs, group_sizes, rhs.dtype, reduce_dtype, sharding
        )
    return dlhs, drhs, None, None, None, None


_gmm_gelu_gate.register_autograd(_backward, setup_context=_setup_context)
