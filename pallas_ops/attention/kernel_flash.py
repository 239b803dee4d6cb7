"""Causal attention in Pallas, one pair of a query block and a key block a grid step.

Grid (batch, key head, pair). The pairs that causality and the window leave are listed beforehand
and prefetched as scalars, so hidden pairs cost neither a step nor a read. A query block holds all
heads that share the key head, stacked.

Forward: softmax with a running maximum over a query block's key blocks. Backward: scores are
computed once, as [keys, queries], for dq, dk and dv. dq of a query block is summed over
its consecutive pairs; dk and dv of all keys of the call stay in VMEM in fp32 and are written by
steps of their own after the last pair. Sequences with more keys than VMEM holds (`max_keys`) take
several calls, whose parts of dq are summed in fp32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.attention.blocks import Flash, flash_vmem_bytes
from pallas_ops.attention.kernel_parts import (
    HIDDEN,
    Heads,
    column,
    deltas,
    dot,
    from_blocks,
    in_reach,
    row,
    stack,
    to_blocks,
    unstack,
    visible,
)
from pallas_ops.chips import V6E

FIRST, LAST, WRITE = 1, 2, 4
"""A query block's first pair, its last one, and the steps that write dk and dv."""
_ROWS_TOGETHER = 256
"""Rows of scores in one chain of the forward. Bundles of a step of the 26B model's global layer by
the compiler's schedule: 8,494 with 128, 6,789 with 256, 7,376 with 512, 7,924 with all 1,024."""


def pairs(
    blocks: Flash, num_queries: int, first_key: int = 0, last_key: int | None = None
) -> np.ndarray:
    """The steps of a call over keys [first_key, last_key): int32 [3, steps], query block, key block
    and flags, query blocks ascending. Blocks that no query and key see together are left out."""
    size_q, size_k, window = blocks.block_q, blocks.block_k, blocks.window
    last_key = num_queries if last_key is None else last_key
    found = []
    for i in range(num_queries // size_q):
        begin = 0 if window is None else max(0, i * size_q - window + 1)
        begin = max(begin, first_key) // size_k
        end = min((i + 1) * size_q, last_key)
        own = [[i, j, 0] for j in range(begin, -(-end // size_k))]
        if own:
            own[0][2] |= FIRST
            own[-1][2] |= LAST
        found += own
    return np.array(found, np.int32).T


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    heads: Heads,
    blocks: Flash,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array]:
    """q [B, S, N * H], k and v [B, S, G * H], segments int32 [B, S], S whole blocks.
    Returns (out [B, S, N * H], log-sum-exp fp32 [B, N, S])."""
    batch, length, _ = q.shape
    size_q = blocks.block_q
    rows = heads.shared * size_q
    steps = pairs(blocks, length)
    queries, keys, query_row, query_segment, key_segment = _specs(blocks, heads)
    out, lse = pl.pallas_call(
        functools.partial(_forward_kernel, heads=heads, blocks=blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, heads.num_kv, steps.shape[1]),
            in_specs=[queries, keys, keys, query_segment, key_segment],
            out_specs=[queries, query_row],
            scratch_shapes=[
                pltpu.VMEM((rows, heads.dim), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads.num_kv, length // size_q, 1, rows), jnp.float32),
        ],
        compiler_params=_compiler_params(blocks, heads, q.dtype.itemsize, 0),
        cost_estimate=_cost(q, heads, blocks, steps.shape[1], num_products=2),
        interpret=interpret,
        name="attention_flash",
    )(*steps, q, k, v, *_segment_blocks(segments, blocks))
    return out, from_blocks(lse, size_q)


def _forward_kernel(
    queries_of,
    keys_of,
    flags,
    q,
    k,
    v,
    query_segment,
    key_segment,
    out,
    lse,
    acc,
    peak,
    total,
    *,
    heads,
    blocks,
):
    step = pl.program_id(2)
    shared, size_q, size_k = heads.shared, blocks.block_q, blocks.block_k

    @pl.when(flags[step] & FIRST != 0)
    def _start():
        acc[...] = jnp.zeros_like(acc)
        total[...] = jnp.zeros_like(total)
        peak[...] = jnp.full_like(peak, HIDDEN)

    distance = queries_of[step] * size_q - keys_of[step] * size_k
    mask = visible(
        column(query_segment[0, 0]) == key_segment[0, 0],
        in_reach(distance, (size_q, size_k), 0, blocks.window),
    )
    # Some heads after the others: while the softmax of some keeps the vector units busy, the matrix
    # units can have the scores of the next.
    key, value = k[0], v[0]
    count = max(1, _ROWS_TOGETHER // size_q)

    def products(first):
        return dot(stack(q[0], heads, first, min(count, shared - first)), key, 1, 1)

    score = products(0)
    for first in range(0, shared, count):
        following = products(first + count) if first + count < shared else None
        num_rows = score.shape[0]
        score = jnp.where(mask, score.reshape(-1, size_q, size_k), HIDDEN)
        score = score.reshape(num_rows, size_k)
        rows = pl.ds(first * size_q, num_rows)
        before = peak[rows]
        now = jnp.maximum(before, jnp.max(score, axis=1, keepdims=True))
        # Where a row has met hidden keys only, its weights are 1 until a real score wipes them out.
        weight = jnp.exp(score - now)
        decay = jnp.exp(before - now)
        peak[rows] = now
        total[rows] = decay * total[rows] + jnp.sum(weight, axis=1, keepdims=True)
        acc[rows] = decay * acc[rows] + dot(weight.astype(value.dtype), value, 1, 0)
        score = following

    @pl.when(flags[step] & LAST != 0)
    def _finish():
        out[0] = unstack((acc[...] / total[...]).astype(out.dtype), shared)
        lse[0, 0, 0] = row(peak[...] + jnp.log(total[...]))


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
    blocks: Flash,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `forward`; out and dout like q, lse fp32 [B, N, S]. Returns (dq, dk, dv)."""
    length = q.shape[1]
    lse = to_blocks(lse, heads.num_kv, blocks.block_q)
    operands = (q, k, v, out, dout, lse, *_segment_blocks(segments, blocks))
    part_of = functools.partial(
        _backward_part, *operands, heads=heads, blocks=blocks, interpret=interpret
    )
    size = length if blocks.max_keys is None else blocks.max_keys
    if size >= length:
        return part_of(keys=(0, length), dq_dtype=q.dtype)[1]
    dq, dks, dvs = jnp.zeros(q.shape, jnp.float32), [], []
    for begin in range(0, length, size):
        keys = (begin, min(begin + size, length))
        first, (part, dk, dv) = part_of(keys=keys, dq_dtype=jnp.float32)
        dq = dq.at[:, first : first + part.shape[1]].add(part)
        dks.append(dk)
        dvs.append(dv)
    return dq.astype(q.dtype), jnp.concatenate(dks, axis=1), jnp.concatenate(dvs, axis=1)


def _backward_part(q, k, *rest, heads, blocks, keys, dq_dtype, interpret):
    """dk and dv of the keys [begin, end), and their part of dq for the queries that see any of
    them. Returns (the first such query, (dq, dk, dv))."""
    batch, length, _ = q.shape
    size_q, size_k = blocks.block_q, blocks.block_k
    rows = heads.shared * size_q
    begin, end = keys
    num_keys, first_k = (end - begin) // size_k, begin // size_k
    steps = pairs(blocks, length, begin, end)
    first_q, last_q = int(steps[0, 0]), int(steps[0, -1])
    writes = np.tile(steps[:, -1:], num_keys)
    writes[2] = WRITE
    written = np.concatenate([np.zeros(steps.shape[1]), np.arange(num_keys)]).astype(np.int32)
    steps = np.concatenate([steps, writes], axis=1)
    queries, key_block, query_row, query_segment, key_segment = _specs(blocks, heads)

    def part(b, g, step, queries_of, keys_of, flags, written):
        return b, queries_of[step] - first_q, g

    def grad_keys(b, g, step, queries_of, keys_of, flags, written):
        return b, written[step], g

    grads = pl.BlockSpec((1, size_k, heads.dim), grad_keys)
    num_queries = (last_q - first_q + 1) * size_q
    kept = jax.ShapeDtypeStruct((batch, end - begin, k.shape[2]), k.dtype)
    outputs = pl.pallas_call(
        functools.partial(_backward_kernel, heads=heads, blocks=blocks, first_k=first_k),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, heads.num_kv, steps.shape[1]),
            in_specs=[
                queries,
                key_block,
                key_block,
                queries,
                queries,
                query_row,
                query_segment,
                key_segment,
            ],
            out_specs=[pl.BlockSpec(queries.block_shape, part), grads, grads],
            scratch_shapes=[
                pltpu.VMEM((rows, heads.dim), q.dtype),
                pltpu.VMEM((rows, heads.dim), q.dtype),
                pltpu.VMEM((1, rows), jnp.float32),
                pltpu.VMEM((rows, heads.dim), jnp.float32),
                pltpu.VMEM((num_keys, size_k, heads.dim), jnp.float32),
                pltpu.VMEM((num_keys, size_k, heads.dim), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, num_queries, q.shape[2]), dq_dtype),
            kept,
            kept,
        ],
        compiler_params=_compiler_params(blocks, heads, q.dtype.itemsize, end - begin),
        cost_estimate=_cost(q, heads, blocks, steps.shape[1], num_products=5),
        interpret=interpret,
        name="attention_flash_backward",
    )(*steps, written, q, k, *rest)
    return first_q * size_q, tuple(outputs)


def _backward_kernel(
    queries_of,
    keys_of,
    flags,
    written,
    q,
    k,
    v,
    out,
    dout,
    lse,
    query_segment,
    key_segment,
    dq,
    dk,
    dv,
    queries,
    cotangents,
    delta,
    acc,
    dk_acc,
    dv_acc,
    *,
    heads,
    blocks,
    first_k,
):
    step = pl.program_id(2)
    shared, size_q, size_k = heads.shared, blocks.block_q, blocks.block_k
    flag = flags[step]

    @pl.when(step == 0)
    def _start_keys():
        @pl.loop(0, dk_acc.shape[0])
        def _(j):
            dk_acc[j] = dv_acc[j] = jnp.zeros(dk_acc.shape[1:], jnp.float32)

    @pl.when(flag & FIRST != 0)
    def _start_queries():
        queries[...], cotangents[...] = stack(q[0], heads), stack(dout[0], heads)
        delta[...] = deltas(out[0], dout[0], heads)
        acc[...] = jnp.zeros_like(acc)

    @pl.when(flag & WRITE == 0)
    def _pair():
        key, value, j = k[0], v[0], keys_of[step] - first_k
        distance = queries_of[step] * size_q - keys_of[step] * size_k
        mask = visible(
            column(key_segment[0, 0]) == query_segment[0, 0],
            in_reach(distance, (size_k, size_q), 1, blocks.window),
        )
        mask = jnp.concatenate([mask] * shared, axis=1)
        score = jnp.where(mask, dot(key, queries[...], 1, 1), HIDDEN)
        weight = jnp.exp(score - lse[0, 0, 0])  # [keys, queries]
        dv_acc[j] += dot(weight.astype(dout.dtype), cotangents[...], 1, 0)
        dscore = weight * (dot(value, cotangents[...], 1, 1) - delta[...])
        dscore = dscore.astype(q.dtype)
        dk_acc[j] += dot(dscore, queries[...], 1, 0)
        acc[...] += dot(dscore, key, 0, 0)

    @pl.when(flag & LAST != 0)
    def _finish_queries():
        dq[0] = unstack(acc[...].astype(dq.dtype), shared)

    @pl.when(flag & WRITE != 0)
    def _write_keys():
        dk[0] = dk_acc[written[step]].astype(dk.dtype)
        dv[0] = dv_acc[written[step]].astype(dv.dtype)


def _specs(blocks, heads):
    """Blocks of queries (or what is like them), of keys, of one fp32 a query, and of segments."""
    size_q, size_k = blocks.block_q, blocks.block_k

    def at_query(b, g, step, queries_of, *_):
        return b, queries_of[step], g

    def at_key(b, g, step, queries_of, keys_of, *_):
        return b, keys_of[step], g

    def row_at_query(b, g, step, queries_of, *_):
        return b, g, queries_of[step], 0, 0

    def segments_at(block):
        return lambda *args: (args[0], block(*args)[1], 0, 0)

    return (
        pl.BlockSpec((1, size_q, heads.shared * heads.dim), at_query),
        pl.BlockSpec((1, size_k, heads.dim), at_key),
        pl.BlockSpec((1, 1, 1, 1, heads.shared * size_q), row_at_query),
        pl.BlockSpec((1, 1, 1, size_q), segments_at(at_query)),
        pl.BlockSpec((1, 1, 1, size_k), segments_at(at_key)),
    )


def _segment_blocks(segments, blocks):
    """[B, S] -> a row of lanes for each query block, and for each key block."""
    batch = segments.shape[0]
    return [segments.reshape(batch, -1, 1, size) for size in (blocks.block_q, blocks.block_k)]


def _compiler_params(blocks, heads, itemsize, num_keys):
    vmem = flash_vmem_bytes(blocks, heads.shared, heads.dim, itemsize) + 8 * num_keys * heads.dim
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary", "arbitrary", "arbitrary"),
        vmem_limit_bytes=min(V6E.vmem_bytes, vmem + V6E.vmem_bytes // 4),
    )


def _cost(q, heads, blocks, num_steps, *, num_products):
    key_rows = q.shape[0] * heads.num_kv * num_steps * blocks.block_k
    found = heads.shared * key_rows * blocks.block_q
    traffic = q.dtype.itemsize * (q.size + key_rows * heads.dim)
    return pl.CostEstimate(
        flops=2 * num_products * found * heads.dim,
        transcendentals=found,
        bytes_accessed=2 * traffic,
    )
