"""Gradients of combine in Pallas: drows[r] = w * dout of r's token, dweights[t, k] = <dout, row>.

The steps, chunks and copies to HBM are those of pallas_ops/permute/kernel_expand.py. A chunk also
has its rows of the forward pass fetched, one chunk ahead, in the granules of its windows. For a
chunk of Q rows and a block of C tokens:

    gram [Q, C]    rows @ dout^T, of which each slot (t, k) wants one element
    dweights       the sum over rows of gram where the row is the slot's: one term, exact
    weight [Q, 1]  the sum over slots of w where the slot's row it is: one term, exact
    drows [Q, D]   weight * (take @ dout), an fp32 product of two exact factors, rounded once

Why granules that windows share are handled so, estimated at 26B's shape and balanced routing:

- written, they are carried in VMEM (5.8 MB, and 42 bundles a window). To read them back from HBM,
  and write them once a block, would be 14,000 granules of 45 KB each way, 0.8 ms of 2.5;
- read, they are fetched for both blocks: 1.2 times the bytes in all, 2.3 ms at full bandwidth.
  combine's ring of three buffers would read them once, for 36 MB of VMEM more, in 1.9 ms; but
  matrix and vector units take 2.4 ms here, so it would gain nothing.

Rows of `gram` that no slot wants may hold anything: they are left out by selects, not by products.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.chips import V6E
from pallas_ops.permute.expand_tables import block_table, layout, seam_table
from pallas_ops.permute.kernel_expand import tokens_by_choice
from pallas_ops.permute.kernel_parts import (
    PART,
    SLOTS,
    chunk_rows,
    columns,
    dot,
    each_window,
    next_slot,
    select_part,
    stage_granules,
    start_copy,
    wait_copies,
    write_seams,
    write_windows,
)
from pallas_ops.routing.blocks import GRANULE

_HALVES = 2
"""Chunks of fetched rows: the one at work and the next."""
_PIECE = 256
"""Rows that are multiplied, chosen and built as one."""
_FEW = 32
"""Rows that are chosen at once: few enough that products find free registers meanwhile."""


def combine_backward_windows(
    dout: jax.Array,
    rows: jax.Array,
    weights: jax.Array,
    bounds: jax.Array,
    shift: jax.Array,
    position: jax.Array,
    *,
    interpret: bool | pltpu.InterpretParams,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """dout [T, D] and rows [T * K, D] bf16, D a multiple of 128, weights [T, K] and tables of
    `routing_windows` -> drows [T * K, D] bf16, dweights [T, K] of weights.dtype, summed in fp32.

    drows is exact but for one rounding. Where `dout` is -0 it is 0, or -0 if the weight is
    negative; where it is not finite, the same column is NaN in the rows of all tokens of the block
    (a product adds 0 times every other token). Weights and rows that are not finite reach the
    gradients of their own slots alone.
    """
    num_tokens, width = dout.shape
    num_blocks, num_groups = shift.shape
    block, top_k = position.shape[0] // num_blocks, position.shape[1]
    num_rows = num_tokens * top_k
    row_bytes = width * rows.dtype.itemsize
    chunk = chunk or chunk_rows(block, top_k, num_groups, row_bytes, SLOTS + _HALVES)
    lines = layout(block, top_k, num_groups, chunk)
    padding = num_blocks * block - num_tokens
    dout = jnp.pad(dout, ((0, padding), (0, 0)))
    rows = jnp.pad(rows, ((0, -num_rows % GRANULE), (0, 0))).reshape(-1, GRANULE, width)
    wide = jnp.pad(weights.astype(jnp.float32), ((0, padding), (0, 0)))
    wide = wide.reshape(num_blocks, block, top_k).transpose(0, 2, 1)

    def here(b):
        return b, 0, 0

    def after(b):
        return jnp.minimum(b + 1, num_blocks - 1), 0, 0

    slots = tokens_by_choice(position, num_tokens, num_blocks)
    table = block_table(bounds, shift, lines, chunk)
    tables = [
        pl.BlockSpec((1, 1, lines.width), at, memory_space=pltpu.SMEM) for at in (here, after)
    ]
    by_choice = pl.BlockSpec((1, top_k, block), here)
    granules = chunk // GRANULE
    drows, dweights = pl.pallas_call(
        functools.partial(_kernel, lines=lines, chunk=chunk, dynamic=interpret is not True),
        grid=(num_blocks,),
        in_specs=[
            *tables,
            pl.BlockSpec((2, num_groups), lambda b: (0, 0), memory_space=pltpu.SMEM),
            by_choice,
            by_choice,
            pl.BlockSpec((block, width), lambda b: (b, 0)),
            pl.BlockSpec(memory_space=pltpu.ANY),
        ],
        out_specs=[pl.BlockSpec(memory_space=pltpu.ANY), by_choice],
        out_shape=[
            jax.ShapeDtypeStruct(rows.shape, rows.dtype),
            jax.ShapeDtypeStruct(slots.shape, jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((stage_granules(chunk, num_groups), GRANULE, width), rows.dtype),
            pltpu.VMEM((_HALVES * granules, GRANULE, width), rows.dtype),
            pltpu.VMEM((chunk, block), dout.dtype),
            pltpu.VMEM((chunk, V6E.num_lanes), jnp.float32),
            pltpu.VMEM((chunk, block), jnp.float32),
            pltpu.VMEM((top_k, GRANULE, block), jnp.float32),
            pltpu.SMEM((SLOTS + 1,), jnp.int32),
            pltpu.SMEM((_HALVES + 1,), jnp.int32),
            pltpu.SemaphoreType.DMA((SLOTS,)),
            pltpu.SemaphoreType.DMA((_HALVES,)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=V6E.vmem_bytes,
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * num_rows * block * width,
            transcendentals=0,
            bytes_accessed=rows.dtype.itemsize * (2 * num_rows + num_tokens) * width,
        ),
        interpret=interpret,
        name="combine_backward",
    )(table, table, seam_table(bounds), slots, wide, dout, rows)
    dweights = dweights.transpose(0, 2, 1).reshape(-1, top_k)[:num_tokens]
    return drows.reshape(-1, width)[:num_rows], dweights.astype(weights.dtype)


def _kernel(
    table,
    next_table,
    seams,
    slots,
    weights,
    dout,
    rows,
    drows,
    dweights,
    stage,
    fetched,
    take,
    scale,
    gram,
    sums,
    pending,
    arriving,
    sems,
    fetch_sems,
    *,
    lines,
    chunk,
    dynamic,
):
    b, num_blocks = pl.program_id(0), pl.num_programs(0)
    num_chunks = table[0, 0, lines.used]
    tiles = columns(dout.shape[1])

    def fetch(source, q, half):
        arriving[half] = _fetch(
            source, lines, q, half, chunk, rows, fetched, fetch_sems.at[half], dynamic
        )

    @pl.when(b == 0)
    def _first():
        for i in range(SLOTS + 1):
            pending[i] = 0
        arriving[_HALVES] = 0
        fetch(table, 0, 0)

    sums[...] = jnp.zeros_like(sums)

    def one_chunk(q, carry):
        at_end = q + 1 == num_chunks
        half = arriving[_HALVES]
        arriving[_HALVES] = 1 - half

        @pl.when(jnp.logical_not(at_end))
        def _fetch_next():
            fetch(table, q + 1, 1 - half)

        @pl.when(at_end & (b + 1 < num_blocks))
        def _fetch_first_of_next():
            fetch(next_table, 0, 1 - half)

        slot = next_slot(pending, stage, sems, dynamic=dynamic)
        wait_copies(arriving[half], fetched, fetch_sems.at[half], dynamic=dynamic)

        def granules_of(own, first_row):
            return pl.ds(first_row // GRANULE + own.start // GRANULE, own.size // GRANULE)

        def multiply(own):
            for n, cols in enumerate(tiles):
                chosen = fetched[granules_of(own, half * chunk), :, cols].reshape(own.size, -1)
                product = dot(chosen, dout[:, cols], transpose=True)
                gram[own] = product if n == 0 else gram[own] + product

        def choose(own):
            for part in range(own.start // PART, (own.start + own.size) // PART):
                select_part(take, slots[0], q * chunk, part)
            for at in range(own.start, own.start + own.size, _FEW):
                _choose_few(scale, sums, gram, slots[0], weights[0], q * chunk, at)

        def build(own):
            for cols in tiles:
                built = dot(take[own], dout[:, cols])
                factor = jnp.concatenate([scale[own]] * (built.shape[1] // V6E.num_lanes), axis=1)
                built = (built * factor).astype(stage.dtype).reshape(-1, GRANULE, built.shape[1])
                stage[granules_of(own, slot * chunk), :, cols] = built

        # Matrix units multiply one piece while vector units choose from the one before.
        pieces = [pl.ds(at, min(_PIECE, chunk - at)) for at in range(0, chunk, _PIECE)]
        multiply(pieces[0])
        for own, after in zip(pieces, [*pieces[1:], None], strict=True):
            if after is not None:
                multiply(after)
            choose(own)
            build(own)
        pending[slot] = write_windows(
            table, lines, q, slot, chunk, stage, drows, sems.at[slot], dynamic=dynamic
        )
        return carry

    jax.lax.fori_loop(0, num_chunks, one_chunk, 0)
    dweights[0] = jnp.sum(sums[...], axis=1)

    @pl.when(b == num_blocks - 1)
    def _last():
        write_seams(seams, pending, stage, drows, sems, chunk=chunk, dynamic=dynamic)


def _choose_few(scale, sums, gram, slots, weights, first, at):
    """For _FEW rows r from `at` of the chunk that begins at buffer row `first`: scale[r] = weight
    of the slot whose row it is; to sums[k, :, c] the element of gram that slot (c, k) wants."""
    own = pl.ds(at, _FEW)
    row = first + at + jax.lax.broadcasted_iota(jnp.int32, (_FEW, gram.shape[1]), 0)
    products = gram[own]
    found = jnp.zeros(row.shape, jnp.float32)
    for k in range(slots.shape[0]):
        mine = slots[k : k + 1] == row
        found = jnp.where(mine, weights[k : k + 1], found)
        wanted = jnp.where(mine, products, 0.0)
        sums[k] += jnp.sum(wanted.reshape(-1, *sums.shape[1:]), axis=0)
    total = jnp.sum(found, axis=1, keepdims=True)
    scale[own] = jnp.broadcast_to(total, (_FEW, scale.shape[1]))


def _fetch(table, lines, q, half, chunk, rows, fetched, sem, dynamic):
    """Starts the copies of a chunk's granules; returns their number."""
    granules = chunk // GRANULE

    def act(g, its):
        first = its.first - q * granules
        begin = jnp.maximum(first, 0)
        count = jnp.minimum(first + its.count + its.open, granules) - begin

        @pl.when(count > 0)
        def _copy():
            source = table[0, 0, lines.first_granules + g] - first + begin
            target = half * granules + begin
            start_copy(rows, source, fetched, target, count, sem, dynamic=dynamic)

        return jnp.maximum(count, 0)

    return each_window(table, lines, q, act)
