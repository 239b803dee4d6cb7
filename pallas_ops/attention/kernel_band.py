"""Sliding-window attention in Pallas: a query block against the whole band of its keys at once.

Grid (batch, key head, block). A step brings one block of queries, of all heads that share the key
head, and one block of keys and values. The band, that block and those before it that the window
reaches, stays in VMEM in rings of `num_blocks` slots, so every key is read from HBM once. Block b
lives in slot b % num_blocks; which of a block's keys are in reach is known from its distance to the
queries alone, so blocks inside the band need no positional mask.

Forward: an exact softmax over the band, no running rescale. Backward: scores are computed once, as
[keys, queries], for dq, dk and dv; the fp32 gradients of keys and values have rings of their own,
and a block is written out when the band leaves it, num_blocks - 1 steps after its queries. These
steps past the last query block only write.

Invariant: slots before the sequence are zeros with a segment of their own, since a product with
what VMEM held before could be NaN even where the weight is zero.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.attention.blocks import Band, band_vmem_bytes
from pallas_ops.attention.kernel_parts import (
    HIDDEN,
    Heads,
    column,
    deltas,
    dot,
    from_blocks,
    in_reach,
    repeat_row,
    row,
    stack,
    to_blocks,
    unstack,
    visible,
)
from pallas_ops.chips import V6E

NO_SEGMENT = -(2**31)
"""Segment of the keys before the sequence; `segments` never holds it."""


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    heads: Heads,
    blocks: Band,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array]:
    """q [B, S, N * H], k and v [B, S, G * H], segments int32 [B, S], S whole blocks.
    Returns (out [B, S, N * H], log-sum-exp fp32 [B, N, S])."""
    batch, length, _ = q.shape
    block, num_steps = blocks.block, length // blocks.block
    rows = heads.shared * block

    def here(b, g, i):
        return b, i, g

    queries = pl.BlockSpec((1, block, heads.shared * heads.dim), here)
    keys = pl.BlockSpec((1, block, heads.dim), here)
    out, lse = pl.pallas_call(
        functools.partial(_forward_kernel, heads=heads, blocks=blocks),
        grid=(batch, heads.num_kv, num_steps),
        in_specs=[
            queries,
            keys,
            keys,
            pl.BlockSpec((1, 1, 1, block), lambda b, g, i: (b, i, 0, 0)),
        ],
        out_specs=[queries, pl.BlockSpec((1, 1, 1, 1, rows), lambda b, g, i: (b, g, i, 0, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads.num_kv, num_steps, 1, rows), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((blocks.num_blocks, block, heads.dim), k.dtype),
            pltpu.VMEM((blocks.num_blocks, block, heads.dim), v.dtype),
            pltpu.VMEM((blocks.num_blocks, 1, block), jnp.int32),
        ],
        compiler_params=_compiler_params(blocks, heads, q.dtype.itemsize, backward=False),
        cost_estimate=_cost(q, k, heads, blocks, num_products=2),
        interpret=interpret,
        name="attention_band",
    )(q, k, v, segments.reshape(batch, num_steps, 1, block))
    return out, from_blocks(lse, block)


def _forward_kernel(q, k, v, segment, out, lse, k_ring, v_ring, segment_ring, *, heads, blocks):
    i = pl.program_id(2)
    block = blocks.block
    depth = blocks.num_blocks
    _begin(i, segment_ring, k_ring, v_ring)

    # Heads are taken one after the other: while one's softmax keeps the vector units busy, the
    # matrix units can have the next one's scores.
    query_segment = column(segment[0, 0])
    keys, values, masks = [], [], []
    for distance in range(depth):
        slot = _slot(i, distance, depth)
        ring = (k_ring[slot], v_ring[slot], segment_ring[slot])
        key, value, key_segment = ring if distance else (k[0], v[0], segment[0, 0])
        keys.append(key)
        values.append(value)
        reach = in_reach(distance * block, (block, block), 0, blocks.window)
        masks.append(visible(query_segment == key_segment, reach))
    products = functools.partial(_scores, keys=keys)
    scores = products(q[0, :, heads.lanes(0)])
    logs = []
    for head in range(heads.shared):
        last = head + 1 == heads.shared
        following = None if last else products(q[0, :, heads.lanes(head + 1)])
        scores = [jnp.where(*x, HIDDEN) for x in zip(masks, scores, strict=True)]
        peak = jnp.max(functools.reduce(jnp.maximum, scores), axis=1, keepdims=True)
        weights = [jnp.exp(score - peak) for score in scores]
        total = jnp.sum(functools.reduce(jnp.add, weights), axis=1, keepdims=True)
        acc = functools.reduce(
            jnp.add,
            [dot(w.astype(x.dtype), x, 1, 0) for w, x in zip(weights, values, strict=True)],
        )
        out[0, :, heads.lanes(head)] = (acc / total).astype(out.dtype)
        logs.append(row(peak + jnp.log(total)))
        scores = following
    lse[0, 0, 0] = jnp.concatenate(logs, axis=1)

    slot = _slot(i, 0, depth)
    k_ring[slot], v_ring[slot], segment_ring[slot] = k[0], v[0], segment[0, 0]


def _scores(queries, *, keys):
    return [dot(queries, key, 1, 1) for key in keys]


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    segments: jax.Array,
    *,
    heads: Heads,
    blocks: Band,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `forward`; out and dout like q, lse fp32 [B, N, S]. Returns (dq, dk, dv)."""
    batch, length, _ = q.shape
    block, depth, num_steps = blocks.block, blocks.num_blocks, length // blocks.block
    rows = heads.shared * block

    def here(b, g, i):
        return b, jnp.minimum(i, num_steps - 1), g

    def row_here(b, g, i):
        return b, g, jnp.minimum(i, num_steps - 1), 0, 0

    def segment_here(b, g, i):
        return b, jnp.minimum(i, num_steps - 1), 0, 0

    def left(b, g, i):
        return b, jnp.maximum(i - (depth - 1), 0), g

    queries = pl.BlockSpec((1, block, heads.shared * heads.dim), here)
    keys = pl.BlockSpec((1, block, heads.dim), here)
    grad_keys = pl.BlockSpec((1, block, heads.dim), left)
    return pl.pallas_call(
        functools.partial(_backward_kernel, heads=heads, blocks=blocks, num_steps=num_steps),
        grid=(batch, heads.num_kv, num_steps + depth - 1),
        in_specs=[
            queries,
            keys,
            keys,
            queries,
            queries,
            pl.BlockSpec((1, 1, 1, 1, rows), row_here),
            pl.BlockSpec((1, 1, 1, block), segment_here),
        ],
        out_specs=[queries, grad_keys, grad_keys],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)],
        scratch_shapes=[
            pltpu.VMEM((depth, block, heads.dim), k.dtype),
            pltpu.VMEM((depth, block, heads.dim), v.dtype),
            pltpu.VMEM((depth, block, 1), jnp.int32),
            pltpu.VMEM((depth, block, heads.dim), jnp.float32),
            pltpu.VMEM((depth, block, heads.dim), jnp.float32),
        ],
        compiler_params=_compiler_params(blocks, heads, q.dtype.itemsize, backward=True),
        cost_estimate=_cost(q, k, heads, blocks, num_products=5),
        interpret=interpret,
        name="attention_band_backward",
    )(
        q,
        k,
        v,
        out,
        dout,
        to_blocks(lse, heads.num_kv, block),
        segments.reshape(batch, num_steps, 1, block),
    )


def _backward_kernel(
    q,
    k,
    v,
    out,
    dout,
    lse,
    segment,
    dq,
    dk,
    dv,
    k_ring,
    v_ring,
    segment_ring,
    dk_ring,
    dv_ring,
    *,
    heads,
    blocks,
    num_steps,
):
    i = pl.program_id(2)
    shared, block, depth = heads.shared, blocks.block, blocks.num_blocks
    _begin(i, segment_ring, k_ring, v_ring, dk_ring, dv_ring)

    @pl.when(i < num_steps)
    def _queries():
        slot = _slot(i, 0, depth)
        k_ring[slot], v_ring[slot] = k[0], v[0]
        segment_ring[slot] = column(segment[0, 0])
        dk_ring[slot] = dv_ring[slot] = jnp.zeros((block, heads.dim), jnp.float32)
        queries, cotangents = stack(q[0], heads), stack(dout[0], heads)
        query_segment = repeat_row(segment[0, 0], shared)
        query_lse, query_delta = lse[0, 0, 0], deltas(out[0], dout[0], heads)
        total = jnp.zeros((shared * block, heads.dim), jnp.float32)

        def products(distance):
            slot = _slot(i, distance, depth)
            return dot(k_ring[slot], queries, 1, 1), dot(v_ring[slot], cotangents, 1, 1)

        score, dweight = products(0)
        for distance in range(depth):
            # In program order before the exponentials, so that both kinds of units have work.
            following = products(distance + 1) if distance + 1 < depth else (None, None)
            slot = _slot(i, distance, depth)
            reach = in_reach(distance * block, (block, block), 1, blocks.window)
            if reach is not None:
                reach = jnp.concatenate([reach] * shared, axis=1)
            mask = visible(segment_ring[slot] == query_segment, reach)
            weight = jnp.exp(jnp.where(mask, score, HIDDEN) - query_lse)  # [keys, queries]
            dv_ring[slot] += dot(weight.astype(dout.dtype), cotangents, 1, 0)
            dscore = (weight * (dweight - query_delta)).astype(q.dtype)
            dk_ring[slot] += dot(dscore, queries, 1, 0)
            total += dot(dscore, k_ring[slot], 0, 0)
            score, dweight = following
        dq[0] = unstack(total.astype(dq.dtype), shared)

    slot = _slot(i, depth - 1, depth)
    dk[0] = dk_ring[slot].astype(dk.dtype)
    dv[0] = dv_ring[slot].astype(dv.dtype)


def _begin(i, segment_ring, *rings):
    @pl.when(i == 0)
    def _before_the_sequence():
        segment_ring[...] = jnp.full_like(segment_ring, NO_SEGMENT)
        for ring in rings:
            ring[...] = jnp.zeros_like(ring)


def _slot(i, distance, depth):
    """Of the block `distance` before block i."""
    return jax.lax.rem(i + depth - distance, depth)


def _compiler_params(blocks, heads, itemsize, *, backward):
    vmem = band_vmem_bytes(blocks, heads.shared, heads.dim, itemsize, backward=backward)
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary", "arbitrary", "arbitrary"),
        vmem_limit_bytes=min(V6E.vmem_bytes, vmem + V6E.vmem_bytes // 4),
    )


def _cost(q, k, heads, blocks, *, num_products):
    pairs = q.size // heads.dim * blocks.num_blocks * blocks.block
    traffic = q.dtype.itemsize * (q.size + k.size)
    return pl.CostEstimate(
        flops=2 * num_products * pairs * heads.dim,
        transcendentals=pairs,
        bytes_accessed=2 * traffic if num_products == 2 else 4 * traffic,
    )
