"""expert_mlp: `gmm(gelu_gate(gmm(rows, gate_up, transpose_rhs=True)), down)`, the gate in kernels.

Apart, the gate reads [R, 2F] and writes [R, F] again, and its gradient takes two passes over as
much: on a v6e a third of the first product's time forward, and more than the second's backward. Run
without gradients, as a recomputed layer is at first (torch_gemma4/recompute.py), [R, 2F] is never
written. kernel.py says which shapes are not gated inside the products.
"""

import torch
from torch import Tensor

from pallas_ops.activation.op import gelu_gate, gelu_gate_gradient
from pallas_ops.checks import (
    check_float,
    check_float_dtype,
    check_group_sizes,
    check_one_device,
    check_rank,
    check_row_shards,
    check_weight_shards,
)
from pallas_ops.expert_mlp import reference
from pallas_ops.sharding import OpSharding, decode, encode


def expert_mlp(
    rows: Tensor,
    gate_up: Tensor,
    down: Tensor,
    group_sizes: Tensor,
    *,
    reduce_dtype: torch.dtype = torch.float32,
    sharding: OpSharding | None = None,
) -> Tensor:
    """down_e^T (gelu_tanh(gate_e x) * up_e x) for each row x of `rows` and its expert e.

    Differentiable in `rows`, `gate_up` and `down`, any number of times. Rows of no expert are zero
    and never read, as in `gmm`.

    Args:
        rows: [R, D], any float dtype; products accumulate in fp32 (fp64 for fp64), are rounded to
            rows.dtype, and gated in at least fp32.
        gate_up: [E, 2F, D], the rows of gate, then those of up; cast to rows.dtype inside.
        down: [E, F, D], likewise.
        group_sizes: int32 [E], or [n, E] with `sharding`: one row for each of the n row shards.
        reduce_dtype: dtype in which gradients of weights are summed over the mesh.
        sharding: layout on the mesh, of both weights, None on one device.

    Returns:
        [R, D] of rows.dtype.

    Raises:
        ValueError: as `gmm`; for weights that do not fit each other or the rows, or of F = 0.
    """
    name = "expert_mlp"
    check_one_device(name, rows=rows, gate_up=gate_up, down=down, group_sizes=group_sizes)
    check_float(name, rows=rows, gate_up=gate_up, down=down)
    check_float_dtype(name, reduce_dtype=reduce_dtype)
    check_rank(name, "rows", rows, "R, D")
    check_rank(name, "gate_up", gate_up, "E, 2F, D")
    check_rank(name, "down", down, "E, F, D")
    num_experts, size_f, size_d = down.shape
    if gate_up.shape != (num_experts, 2 * size_f, size_d) or rows.shape[1] != size_d or not size_f:
        raise ValueError(
            f"{name}: rows {list(rows.shape)}, gate_up {list(gate_up.shape)} and down "
            f"{list(down.shape)} must be [R, D], [E, 2F, D] and [E, F, D] with F >= 1; store "
            "gate's rows above up's, and D last in both"
        )
    check_group_sizes(name, group_sizes, num_experts, sharding)
    check_row_shards(name, "rows", rows.shape[0], sharding)
    check_weight_shards(name, gate_up.shape, sharding, "gate_up")
    check_weight_shards(name, down.shape, sharding, "down")
    operands = (rows, gate_up, down)
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
    return _expert_mlp(*operands, group_sizes, keeps, reduce_dtype, encode(sharding))[0]


@torch.library.custom_op("pallas_ops::expert_mlp", mutates_args=(), device_types="cpu")
def _expert_mlp(
    rows: Tensor,
    gate_up: Tensor,
    down: Tensor,
    group_sizes: Tensor,
    keeps: bool,
    reduce_dtype: torch.dtype,
    sharding: str,
) -> tuple[Tensor, Tensor, Tensor]:
    out, hidden, product = reference.expert_mlp(rows, gate_up, down, group_sizes)
    return (out, hidden, product) if keeps else (out, *_kept(rows, down, 0))


def _kept(rows: Tensor, down: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Memory of what is kept for the gradient: hidden [R, F] and the first product [R, 2F]."""
    size_f = down.shape[1]
    return rows.new_empty(num_rows, size_f), rows.new_empty(num_rows, 2 * size_f)


@_expert_mlp.register_kernel("xla")
def _(rows, gate_up, down, group_sizes, keeps, reduce_dtype, sharding):
    from pallas_ops import bridge
    from pallas_ops.expert_mlp import kernel

    operands, layout = (rows, gate_up, down, group_sizes), decode(sharding)
    static = {"keeps": keeps}
    if layout is None:
        found = bridge.call(kernel.expert_mlp, operands, static=static)
    else:
        by_row, weight = layout.row_spec(2), layout.weight_spec
        found = bridge.call(
            kernel.expert_mlp_sharded,
            operands,
            static=static | {"weight_axis": layout.weight_axis, "weight_dim": layout.weight_dim},
            sharding=layout,
            in_specs=(by_row, weight, weight, by_row),
            out_specs=(by_row,) * (3 if keeps else 1),
        )
    return tuple(found) if keeps else (found[0], *_kept(rows, down, 0))


@_expert_mlp.register_fake
def _(rows, gate_up, down, group_sizes, keeps, reduce_dtype, sharding):
    return torch.empty_like(rows), *_kept(rows, down, rows.shape[0] if keeps else 0)


@torch.library.custom_op(
    "pallas_ops::expert_mlp_gate_gradient", mutates_args=(), device_types="cpu"
)
def _gate_gradient(
    dout: Tensor, down: Tensor, product: Tensor, group_sizes: Tensor, sharding: str
) -> Tensor:
    return reference.gate_gradient(dout, down, product, group_sizes)


@_gate_gradient.register_kernel("xla")
def _(dout, down, product, group_sizes, sharding):
    from pallas_ops import bridge
    from pallas_ops.expert_mlp import kernel

    operands, layout = (dout, down, product, group_sizes), decode(sharding)
    if layout is None:
        return bridge.call(kernel.gmm_gate_gradient, operands)[0]
    by_row = layout.row_spec(2)
    return bridge.call(
        kernel.gmm_gate_gradient_sharded,
        operands,
        static={"weight_axis": layout.weight_axis, "weight_dim": layout.weight_dim},
        sharding=layout,
        in_specs=(by_row, layout.weight_spec, by_row, by_row),
        out_specs=(by_row,),
    )[0]


@_gate_gradient.register_fake
def _(dout, down, product, group_sizes, sharding):
    return torch.empty_like(product)


def _setup_context(ctx, inputs, output):
    *operands, ctx.keeps, reduce_dtype, sharding = inputs
    ctx.config = reduce_dtype, sharding
    _, hidden, product = output
    ctx.mark_non_differentiable(hidden, product)
    ctx.set_materialize_grads(False)  # else zeros for them
    ctx.save_for_backward(*operands, hidden, product)


def _backward(ctx, dout, *_):
    if dout is None:
        return (None,) * 7
    rows, gate_up, down, group_sizes, hidden, product = ctx.saved_tensors
    gmm, tgmm = torch.ops.pallas_ops.gmm, torch.ops.pallas_ops.tgmm
    drows = dgate_up = ddown = None
    if torch.is_grad_enabled() or not ctx.keeps:
        # A gradient of this gradient goes through both products.
        product = gmm(rows, gate_up, group_sizes, True, *ctx.config)
        hidden = gelu_gate(product)
        dhidden = gmm(dout, down, group_sizes, True, *ctx.config)
        dproduct = gelu_gate_gradient(product, dhidden)
    elif any(ctx.needs_input_grad[:2]):
        dproduct = _gate_gradient(dout, down, product, group_sizes, ctx.config[1])
    if ctx.needs_input_grad[0]:
        drows = gmm(dproduct, gate_up, group_sizes, False, *ctx.config)
    if ctx.needs_input_grad[1]:
        dgate_up = tgmm(dproduct, rows, group_sizes, gate_up.dtype, *ctx.config)
    if ctx.needs_input_grad[2]:
        ddown = tgmm(hidden, dout, group_sizes, down.dtype, *ctx.config)
    return drows, dgate_up, ddown, None, None, None, None


_expert_mlp.register_autograd(_backward, setup_context=_setup_context)
