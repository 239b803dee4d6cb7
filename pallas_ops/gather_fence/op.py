"""gather_fence: a value that is not there before given weights are gathered."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pallas_ops.checks import (
    check_float,
    check_float_dtype,
    check_one_device,
    check_row_shards,
    check_weight_shards,
)
from pallas_ops.sharding import OpSharding, decode, encode


def gather_fence(
    x: Tensor, weights: Sequence[Tensor], *, dtype: torch.dtype, sharding: OpSharding | None = None
) -> Tensor:
    """x, bit for bit, but on a mesh computed only after `weights` are gathered in `dtype`.

    The compiler then begins those gathers before whatever reads the result. A barrier ties them
    together, not a product with zero: Inf or NaN in a weight reaches nothing. The gathers are those
    of `gmm` and `split_gmm`, made once. Without a mesh, or with whole weights, there is nothing to
    wait for. Differentiable in x; the weights get no gradient from here.

    Args:
        x: [T, ...], any float dtype.
        weights: [E, ., .] each, or [2, E, ., .] as `split_experts` gives.
        dtype: that of the products which read the weights.
        sharding: layout on the mesh, None on one device.

    Returns:
        as x.

    Raises:
        ValueError: no weights, wrong ranks, dtypes or devices, rows or weights that the mesh does
            not divide.
    """
    named = {f"weights[{i}]": weight for i, weight in enumerate(weights)}
    if not named:
        raise ValueError("gather_fence: weights is empty; name those to wait for")
    check_one_device("gather_fence", x=x, **named)
    check_float("gather_fence", x=x, **named)
    check_float_dtype("gather_fence", dtype=dtype)
    check_row_shards("gather_fence", "x", x.shape[0], sharding)
    for name, weight in named.items():
        if weight.ndim not in (3, 4):
            raise ValueError(
                f"gather_fence: {name} has shape {list(weight.shape)}; expected [E, ., .], or "
                "[2, E, ., .] in two halves"
            )
        check_weight_shards("gather_fence", weight.shape[-3:], sharding)
    return _gather_fence(x, list(weights), dtype, encode(sharding))


@torch.library.custom_op("pallas_ops::gather_fence", mutates_args=(), device_types="cpu")
def _gather_fence(
    x: Tensor, weights: Sequence[Tensor], dtype: torch.dtype, sharding: str
) -> Tensor:
    return x.clone()


@_gather_fence.register_kernel("xla")
def _(x, weights, dtype, sharding):
    from pallas_ops import bridge
    from pallas_ops.gather_fence import kernel

    layout = decode(sharding)
    if layout is None or layout.weight_dim is None:
        return x.clone()
    rows = layout.row_spec(x.ndim)
    return bridge.call(
        kernel.gather_fence_sharded,
        (x, *weights),
        static={
            "dtype": bridge.jax_dtype(dtype),
            "weight_axis": layout.weight_axis,
            "weight_dim": layout.weight_dim,
        },
        sharding=layout,
        in_specs=(rows, *((None,) * (w.ndim - 3) + layout.weight_spec for w in weights)),
        out_specs=(rows,),
    )[0]


@_gather_fence.register_fake
def _(x, weights, dtype, sharding):
    return torch.empty_like(x)


def _setup_context(ctx, inputs, output):
    ctx.num_weights = len(inputs[1])


def _backward(ctx, dout):
    return dout, [None] * ctx.num_weights, None, None


_gather_fence.register_autograd(_backward, setup_context=_setup_context)
