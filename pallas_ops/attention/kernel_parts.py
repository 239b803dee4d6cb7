"""What the attention kernels share: products, visibility, and vectors as rows or columns."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Score of a hidden key: exp of its distance from any real score is exactly zero, and differences
of two of them stay finite."""


@dataclass(frozen=True)
class Heads:
    """How lanes [heads * H] divide into heads."""

    num_kv: int
    """Key heads."""
    shared: int
    """Query heads that share a key head."""
    dim: int
    """Lanes of a head, whole registers."""

    def lanes(self, head: int) -> slice:
        """Where a head of a block lies."""
        return slice(head * self.dim, (head + 1) * self.dim)


def stack(x: jax.Array, heads: Heads, first: int = 0, count: int | None = None) -> jax.Array:
    """[rows, heads * H] -> [count * rows, H]: some heads one below the other."""
    count = heads.shared if count is None else count
    return jnp.concatenate([x[:, heads.lanes(first + i)] for i in range(count)], axis=0)


def unstack(x: jax.Array, count: int) -> jax.Array:
    """Inverse of `stack`, of all heads."""
    return jnp.concatenate(jnp.split(x, count, axis=0), axis=1)


def deltas(out: jax.Array, dout: jax.Array, heads: Heads) -> jax.Array:
    """fp32 [1, shared * rows] of blocks [rows, shared * H], in the order of `stack`: the row sums
    of out * dout, which are sum_j p_ij dp_ij, the mean that the softmax takes off its cotangent."""
    product = out.astype(jnp.float32) * dout.astype(jnp.float32)
    sums = [
        row(jnp.sum(product[:, heads.lanes(i)], axis=1, keepdims=True)) for i in range(heads.shared)
    ]
    return jnp.concatenate(sums, axis=1)


def dot(a: jax.Array, b: jax.Array, dim_a: int, dim_b: int) -> jax.Array:
    """Contracts dim_a of `a` [., .] with dim_b of `b` [., .], in fp32."""
    return lax.dot_general(
        a,
        b,
        (((dim_a,), (dim_b,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype.itemsize == 4 else None,
        preferred_element_type=jnp.float32,
    )


def in_reach(
    distance: int | jax.Array,
    shape: tuple[int, int],
    query_dim: int,
    window: int | None,
) -> jax.Array | None:
    """Which keys of a block causality and the window leave to the queries of another: bool of
    `shape`, queries along `query_dim`. None where it is known that they leave all.

    Args:
        distance: first query minus first key, an int where it is static.
    """
    num_queries, num_keys = shape[query_dim], shape[1 - query_dim]
    traced = not isinstance(distance, int)
    causal = traced or distance < num_keys - 1
    windowed = window is not None and (traced or distance + num_queries - 1 >= window)
    if not causal and not windowed:
        return None
    queries = lax.broadcasted_iota(jnp.int32, shape, query_dim)
    keys = lax.broadcasted_iota(jnp.int32, shape, 1 - query_dim)
    ahead = queries - keys
    mask = ahead >= -distance if causal else None
    if windowed:
        near = ahead < window - distance
        mask = near if mask is None else mask & near
    return mask


def visible(same_segment: jax.Array, reach: jax.Array | None) -> jax.Array:
    """Both conditions on a key."""
    return same_segment if reach is None else same_segment & reach


def column(row: jax.Array) -> jax.Array:
    """[1, n] along lanes -> [n, 1] along sublanes."""
    return jnp.broadcast_to(row, (128, row.shape[1])).T[:, :1]


def row(column: jax.Array) -> jax.Array:
    """[n, 1] along sublanes -> [1, n] along lanes."""
    return jnp.broadcast_to(column, (column.shape[0], 128)).T[:1]


def repeat_row(x: jax.Array, times: int) -> jax.Array:
    """[1, n] -> [1, times * n]: one value a query for all heads that share a key head."""
    return x if times == 1 else jnp.concatenate([x] * times, axis=1)


def to_blocks(x: jax.Array, num_kv_heads: int, block: int) -> jax.Array:
    """[B, N, S] -> [B, G, S / block, 1, N / G * block]: one row of lanes a query block, in the
    order of its stacked heads."""
    batch, num_heads, length = x.shape
    shared = num_heads // num_kv_heads
    x = x.reshape(batch, num_kv_heads, shared, length // block, block)
    return x.swapaxes(2, 3).reshape(batch, num_kv_heads, length // block, 1, shared * block)


def from_blocks(x: jax.Array, block: int) -> jax.Array:
    """Inverse of `to_blocks`."""
    batch, num_kv_heads, num_blocks, _, rows = x.shape
    x = x.reshape(batch, num_kv_heads, num_blocks, rows // block, block).swapaxes(2, 3)
    return x.reshape(batch, -1, num_blocks * block)
