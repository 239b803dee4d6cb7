"""Attention and its gradient in JAX: padding, layouts, and the choice of the Pallas kernel.

The kernels read and write [B, S, heads * H], as projections make and take it: a head is a run of
lanes, so nothing is transposed. Heads are padded to whole registers of lanes with zeros, which
change no product, and sequences at their end to whole blocks. Causality alone hides the padding's
keys from every real query, and its queries have zero cotangents, so the padding reaches nothing;
its values are zeros, so it is finite itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.attention import kernel_band, kernel_flash
from pallas_ops.attention.blocks import Band, Flash, choose_backward, choose_forward
from pallas_ops.attention.kernel_parts import Heads
from pallas_ops.chips import V6E


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
    operands = [_as_lanes(x, padded) for x in (q, k, v)]
    kernel = kernel_band if isinstance(blocks, Band) else kernel_flash
    segments = _segments(segment_ids, q, padded)
    out, lse = kernel.forward(
        *operands, segments, heads=heads_of(q, k), blocks=blocks, interpret=interpret
    )
    return _from_lanes(out, q), lse[:, :, :length]


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
    operands = [_as_lanes(x, padded) for x in (q, k, v, out, dout.astype(q.dtype))]
    kernel = kernel_band if isinstance(blocks, Band) else kernel_flash
    grads = kernel.backward(
        *operands,
        _pad(lse, 2, padded),
        _segments(segment_ids, q, padded),
        heads=heads_of(q, k),
        blocks=blocks,
        interpret=interpret,
    )
    return tuple(_from_lanes(grad, x) for grad, x in zip(grads, (q, k, v), strict=True))


def _padded_length(length: int, blocks: Band | Flash) -> int:
    multiple = blocks.block if isinstance(blocks, Band) else max(blocks.block_q, blocks.block_k)
    return -(-length // multiple) * multiple


def _pad(x: jax.Array, dim: int, length: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, length - x.shape[dim])
    return jnp.pad(x, widths)


def heads_of(q: jax.Array, k: jax.Array) -> Heads:
    """The heads of q [B, S, N, H] and k [B, S, G, H] as the kernels see them."""
    return Heads(k.shape[2], q.shape[2] // k.shape[2], _whole_registers(q.shape[3]))


def _whole_registers(lanes: int) -> int:
    return -(-lanes // V6E.num_lanes) * V6E.num_lanes


def _as_lanes(x: jax.Array, length: int) -> jax.Array:
    """[B, S, heads, H] -> [B, length, heads * whole registers]."""
    x = _pad(x, 3, _whole_registers(x.shape[3]))
    return _pad(x.reshape(*x.shape[:2], -1), 1, length)


def _from_lanes(x: jax.Array, like: jax.Array) -> jax.Array:
    """Inverse of `_as_lanes`."""
    _, length, num_heads, head_dim = like.shape
    return x[:, :length].reshape(*like.shape[:2], num_heads, -1)[..., :head_dim]


def _segments(segment_ids: jax.Array | None, q: jax.Array, length: int) -> jax.Array:
    """[B, length] of which no id is the kernels' own, the least int32: each row is shifted, modulo
    2**32, to end at the greatest one."""
    if segment_ids is None:
        return jnp.zeros((q.shape[0], length), jnp.int32)
    shift = jnp.iinfo(jnp.int32).max - jnp.max(segment_ids, axis=1, keepdims=True)
    return _pad(segment_ids + shift, 1, length)
