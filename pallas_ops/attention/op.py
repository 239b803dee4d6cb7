"""attention: causal softmax attention, whole or in a window, inside documents."""

import torch
from torch import Tensor

from pallas_ops.attention import reference
from pallas_ops.checks import (
    check_float,
    check_int32,
    check_one_device,
    check_rank,
    check_row_shards,
)
from pallas_ops.sharding import OpSharding, decode, encode


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None,
    segment_ids: Tensor | None = None,
    sharding: OpSharding | None = None,
) -> Tensor:
    """out[i] = sum over visible j of softmax_j(q[i] . k[j]) v[j], for every head.

    Key j is visible to query i if j <= i, i - j < window, and both are of one segment. Query head n
    reads key head n // (N / G). Scores are not scaled; they, the softmax and all sums are fp32 at
    least (the weights enter the kernels' second product in v.dtype). Differentiable once, in q, k
    and v: the backward recomputes the weights from the saved log-sum-exp.

    Args:
        q: [B, S, N, H], any float dtype.
        k: [B, S, G, H] of the same dtype; G divides N.
        v: [B, S, G, H] of the same dtype.
        window: number of keys a query sees at most, itself included; None = all before it.
        segment_ids: int32 [B, S], any ids as long as no sequence has both the least and the
            greatest int32 (kernels keep one value for themselves); None = one segment.
        sharding: layout on the mesh, None on one device; the batch is split over its row axes.

    Returns:
        [B, S, N, H] of q.dtype.

    Raises:
        ValueError: wrong rank, shape, dtype or device, a window below 1, heads that the key heads
            do not divide, a batch that the mesh does not divide; on CPU tensors also both extreme
            ids in one sequence.
    """
    check_one_device("attention", q=q, k=k, v=v)
    check_float("attention", q=q, k=k, v=v)
    check_rank("attention", "q", q, "B, S, N, H")
    check_rank("attention", "k", k, "B, S, G, H")
    batch, length, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    expected = [batch, length, num_kv_heads, head_dim]
    for name, tensor in (("k", k), ("v", v)):
        if list(tensor.shape) != expected:
            raise ValueError(
                f"attention: {name} has shape {list(tensor.shape)} but q has {list(q.shape)}; "
                f"expected {expected}: the batch, length and head size of q, one G for k and v"
            )
        if tensor.dtype != q.dtype:
            raise ValueError(
                f"attention: {name} is {tensor.dtype} but q is {q.dtype}; cast them to one dtype"
            )
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"attention: q has {num_heads} heads, which the {num_kv_heads} heads of k do not "
            "divide; every key head serves the same number of query heads"
        )
    if window is not None and window < 1:
        raise ValueError(
            f"attention: window is {window}; it counts the query itself, so it must be at least 1 "
            "(None = no window)"
        )
    if segment_ids is not None:
        check_one_device("attention", q=q, segment_ids=segment_ids)
        check_int32("attention", segment_ids=segment_ids)
        if list(segment_ids.shape) != [batch, length]:
            raise ValueError(
                f"attention: segment_ids has shape {list(segment_ids.shape)}; expected "
                f"{[batch, length]}, one id a token"
            )
    check_row_shards("attention", "q (its batch)", batch, sharding)
    return _attention(q, k, v, segment_ids, window, encode(sharding))[0]


@torch.library.custom_op("pallas_ops::attention", mutates_args=(), device_types="cpu")
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_ids: Tensor | None,
    window: int | None,
    sharding: str,
) -> tuple[Tensor, Tensor]:
    if segment_ids is not None:
        limits = torch.iinfo(torch.int32)
        least, greatest = ((segment_ids == x).any(1) for x in (limits.min, limits.max))
        if (least & greatest).any():
            raise ValueError(
                f"attention: a sequence of segment_ids holds both {limits.min} and {limits.max}, "
                "one of which the kernels keep for themselves; renumber one"
            )
    return reference.attention(q, k, v, segment_ids, window=window)


@_attention.register_kernel("xla")
def _(q, k, v, segment_ids, window, sharding):
    from pallas_ops.attention import kernel

    return _call(kernel.attention, (q, k, v), segment_ids, window, sharding, out_ndims=(4, 3))


@_attention.register_fake
def _(q, k, v, segment_ids, window, sharding):
    batch, length, num_heads, _ = q.shape
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(batch, num_heads, length, dtype=lse_dtype)


@torch.library.custom_op("pallas_ops::attention_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    segment_ids: Tensor | None,
    window: int | None,
    sharding: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.attention_backward(q, k, v, out, lse, dout, segment_ids, window=window)


@_attention_backward.register_kernel("xla")
def _(q, k, v, out, lse, dout, segment_ids, window, sharding):
    from pallas_ops.attention import kernel

    operands = (q, k, v, out, lse, dout)
    return _call(
        kernel.attention_backward, operands, segment_ids, window, sharding, out_ndims=(4, 4, 4)
    )


@_attention_backward.register_fake
def _(q, k, v, out, lse, dout, segment_ids, window, sharding):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _call(fn, operands, segment_ids, window, sharding, *, out_ndims):
    """A kernel on whole sequences, the batch split over the mesh."""
    from pallas_ops import bridge

    if segment_ids is not None:
        operands = (*operands, segment_ids)
    layout = decode(sharding)
    if layout is None:
        return bridge.call(fn, operands, static={"window": window})
    return bridge.call(
        fn,
        operands,
        static={"window": window},
        sharding=layout,
        in_specs=[layout.row_spec(x.ndim) for x in operands],
        out_specs=[layout.row_spec(ndim) for ndim in out_ndims],
    )


def _setup_context(ctx, inputs, output):
    *tensors, segment_ids, ctx.window, ctx.sharding = inputs
    ctx.save_for_backward(*tensors, *output, segment_ids)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dout, _):
    *saved, segment_ids = ctx.saved_tensors
    grads = _attention_backward(*saved, dout, segment_ids, ctx.window, ctx.sharding)
    return *grads, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)
