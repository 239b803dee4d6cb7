"""Attention and its gradient in JAX: padding, layouts, and the choice of the Pallas kernel.

Sequences are padded at their end to whole blocks. Causality alone hides the padding's keys from
every real query, and its queries have zero cotangents, so the padding reaches nothing; its values
are zeros, so it is finite itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.attention import kernel_band, kernel_flash
from pallas_ops.attention.blocks import Band, Flash, choose_backward, choose_forward


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    window: int | None,
    interpret: bool | pltpu.InterpretParams,
    blocks: Band | Flash | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One device. q [B, S, N, H], k and v [B, S, G, H], segment_ids int32 [B, S] or None.
    Returns (out [B, S, N, H] of q.dtype, log-sum-exp fp32 [B, N, S])."""
    length, num_heads, head_dim = q.shape[1:]
    if not q.size:
        return q, jnp.zeros((q.shape[0], num_heads, length), jnp.float32)
    if blocks is None:
        num_shared = num_heads // k.shape[2]
        blocks = choose_forward(length, num_shared, head_dim, window, q.dtype.itemsize)
    padded = _padded_length(length, blocks)
    operands = [_heads_first(x, padded) for x in (q, k, v)]
    kernel = kernel_band if isinstance(blocks, Band) else kernel_flash
    segments = _segments(segment_ids, q, padded)
    out, lse = kernel.forward(*operands, segments, blocks=blocks, interpret=interpret)
    return jnp.swapaxes(out[:, :, :length], 1, 2), lse[:, :, :length]


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    window: int | None,
    interpret: bool | pltpu.InterpretParams,
    blocks: Band | Flash | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of `attention` at its operands, given its results: (dq, dk, dv), each of its
    operand's shape and dtype."""
    length, num_heads, head_dim = q.shape[1:]
    if not q.size:
        return q, jnp.zeros_like(k), jnp.zeros_like(v)
    if blocks is None:
        num_shared = num_heads // k.shape[2]
        blocks = choose_backward(length, num_shared, head_dim, window, q.dtype.itemsize)
    padded = _padded_length(length, blocks)
    # sum_j p_ij dp_ij, the mean that the softmax takes off its cotangent.
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    operands = [_heads_first(x, padded) for x in (q, k, v, dout.astype(q.dtype))]
    rows = [_pad(x, 2, padded) for x in (lse, jnp.swapaxes(delta, 1, 2))]
    kernel = kernel_band if isinstance(blocks, Band) else kernel_flash
    segments = _segments(segment_ids, q, padded)
    grads = kernel.backward(*operands, *rows, segments, blocks=blocks, interpret=interpret)
    return tuple(jnp.swapaxes(x[:, :, :length], 1, 2) for x in grads)


def _padded_length(length: int, blocks: Band | Flash) -> int:
    multiple = blocks.block if isinstance(blocks, Band) else max(blocks.block_q, blocks.block_k)
    return -(-length // multiple) * multiple


def _pad(x: jax.Array, dim: int, length: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, length - x.shape[dim])
    return jnp.pad(x, widths)


def _heads_first(x: jax.Array, length: int) -> jax.Array:
    return _pad(jnp.swapaxes(x, 1, 2), 2, length)


def _segments(segment_ids: jax.Array | None, q: jax.Array, length: int) -> jax.Array:
    """[B, length] of which no id is the kernels' own, the least int32: each row is shifted, modulo
    2**32, to end at the greatest one."""
    if segment_ids is None:
        return jnp.zeros((q.shape[0], length), jnp.int32)
    shift = jnp.iinfo(jnp.int32).max - jnp.max(segment_ids, axis=1, keepdims=True)
    return _pad(segment_ids + shift, 1, length)
