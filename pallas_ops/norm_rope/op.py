"""norm_rope: RMSNorm of every head, then rotary embedding, one rounding."""

import torch
from torch import Tensor

from pallas_ops.checks import check_float, check_one_device, check_rank, check_row_shards
from pallas_ops.norm_rope import reference
from pallas_ops.sharding import OpSharding, decode, encode, num_row_shards


def norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    eps: float,
    sharding: OpSharding | None = None,
) -> Tensor:
    """Every head of x divided by its root mean square, scaled, and turned by its position.

    With y = x * (mean(x^2) + eps)^(-1/2) * weight and its halves y1, y2 along H, the result is
    (y1 cos - y2 sin, y2 cos + y1 sin): Zhang and Sennrich, "Root Mean Square Layer Normalization",
    2019; Su et al., "RoFormer", 2021, in the half-split form. Computed in fp32 at least and rounded
    once, forward and backward. Differentiable once, in x and weight.

    Args:
        x: [B, S, N, H], any float dtype, H even.
        weight: [H], any float dtype; None = no scale.
        cos, sin: [S, 1, H/2] or [B, S, 1, H/2], fp32 at least; None, both = no rotation.
        eps: added to the mean square.
        sharding: layout on the mesh, None on one device; the batch is split over its row axes.

    Returns:
        [B, S, N, H] of x.dtype.

    Raises:
        ValueError: wrong rank, shape, dtype or device, an odd H, one table without the other, a
            batch that the mesh does not divide.
    """
    tables = {name: t for name, t in (("cos", cos), ("sin", sin)) if t is not None}
    given = tables if weight is None else {"weight": weight, **tables}
    check_one_device("norm_rope", x=x, **given)
    check_float("norm_rope", x=x, **given)
    check_rank("norm_rope", "x", x, "B, S, N, H")
    batch, length, _, head_dim = x.shape
    if head_dim % 2:
        raise ValueError(f"norm_rope: x has shape {list(x.shape)}; the last dimension must be even")
    if weight is not None and list(weight.shape) != [head_dim]:
        raise ValueError(
            f"norm_rope: weight has shape {list(weight.shape)}; expected {[head_dim]}, as the last "
            "dimension of x"
        )
    if len(tables) == 1:
        raise ValueError(f"norm_rope: only {next(iter(tables))} is given; give cos and sin or none")
    shared = [length, 1, head_dim // 2]
    for name, table in tables.items():
        if list(table.shape) not in (shared, [batch, *shared]):
            raise ValueError(
                f"norm_rope: {name} has shape {list(table.shape)}; expected {shared} or "
                f"{[batch, *shared]}: S, one for all heads, H/2"
            )
    check_row_shards("norm_rope", "x (its batch)", batch, sharding)
    return _norm_rope(x, weight, cos, sin, eps, encode(sharding))


@torch.library.custom_op("pallas_ops::norm_rope", mutates_args=(), device_types="cpu")
def _norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    sharding: str,
) -> Tensor:
    return reference.norm_rope(x, weight, cos, sin, eps=eps)


@_norm_rope.register_kernel("xla")
def _(x, weight, cos, sin, eps, sharding):
    from pallas_ops.norm_rope import kernel

    return _call(kernel.norm_rope, (x,), weight, cos, sin, eps, sharding, out_ndims=(4,))[0]


@_norm_rope.register_fake
def _(x, weight, cos, sin, eps, sharding):
    return x.new_empty(x.shape)


@torch.library.custom_op("pallas_ops::norm_rope_backward", mutates_args=(), device_types="cpu")
def _norm_rope_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    eps: float,
    sharding: str,
) -> tuple[Tensor, Tensor]:
    shards = num_row_shards(decode(sharding))
    return reference.norm_rope_backward(dout, x, weight, cos, sin, eps=eps, num_shards=shards)


@_norm_rope_backward.register_kernel("xla")
def _(dout, x, weight, cos, sin, eps, sharding):
    from pallas_ops.norm_rope import kernel

    operands = (dout, x)
    return _call(
        kernel.norm_rope_backward, operands, weight, cos, sin, eps, sharding, out_ndims=(4, 2)
    )


@_norm_rope_backward.register_fake
def _(dout, x, weight, cos, sin, eps, sharding):
    wide = torch.promote_types(x.dtype, torch.float32)
    shards = num_row_shards(decode(sharding))
    return x.new_empty(x.shape), x.new_empty(shards, x.shape[-1], dtype=wide)


def _call(fn, operands, weight, cos, sin, eps, sharding, *, out_ndims):
    """A kernel on whole sequences, the batch split over the mesh."""
    from pallas_ops import bridge

    tables = () if cos is None else (cos, sin)
    shared = bool(tables) and cos.ndim == 3
    tables = tuple(t[None] if shared else t for t in tables)
    weights = () if weight is None else (weight,)
    static = {"scaled": weight is not None, "turned": bool(tables), "eps": eps}
    layout = decode(sharding)
    if layout is None:
        return bridge.call(fn, (*operands, *weights, *tables), static=static)
    rows = layout.row_spec(4)
    return bridge.call(
        fn,
        (*operands, *weights, *tables),
        static=static,
        sharding=layout,
        in_specs=[
            *[rows] * len(operands),
            *[(None,)] * len(weights),
            *[(None,) * 4 if shared else rows] * len(tables),
        ],
        out_specs=[layout.row_spec(ndim) for ndim in out_ndims],
    )


def _setup_context(ctx, inputs, output):
    *tensors, ctx.eps, ctx.sharding = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dout):
    x, weight, cos, sin = ctx.saved_tensors
    dx, dweight = _norm_rope_backward(dout, x, weight, cos, sin, ctx.eps, ctx.sharding)
    dweight = None if weight is None else dweight.sum(0).to(weight.dtype)
    return dx, dweight, None, None, None, None


_norm_rope.register_autograd(_backward, setup_context=_setup_context)
