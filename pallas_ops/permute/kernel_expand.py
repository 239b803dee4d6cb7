"""Tokens to rows in Pallas: row r is a copy of the token that was routed there, to the bit.

One grid step is a block of C tokens (pallas_ops/routing/windows.py). Its rows are built in VMEM in
chunks, by a product with the 0/1 matrix of which row takes which token: exact in bf16, since each
sum has one term that is not zero. The matrix comes from comparing the tokens' positions with row
numbers, one chunk ahead of its use, so that vector units work while matrix units do.

A sum of zeros has lost the sign of -0, and 0 times what is not finite is NaN. So a block of tokens
that has such a number anywhere is copied by two products, of its upper and its lower bytes as
numbers from 0 to 255. That takes twice the work of matrix units, for that block alone.

HBM is written in granules of 8 rows, each exactly once, whole:

- a granule that a block leaves incomplete is *carried*: kept in VMEM, one for each expert, and
  merged with the expert's next rows, in whatever block they come;
- a granule with rows of several experts, a *seam*, is never complete in that way. The last expert
  in it writes it with some rows wrong; when all blocks are done, those rows are put right from the
  carried granules of the experts before.

So no block reads what another wrote, and what is written is the rows and at most one granule more
for each expert.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.chips import V6E
from pallas_ops.permute.expand_tables import block_table, layout, seam_table
from pallas_ops.permute.kernel_parts import (
    PART,
    SLOTS,
    chunk_rows,
    columns,
    dot,
    next_slot,
    select_part,
    stage_granules,
    write_seams,
    write_windows,
)
from pallas_ops.routing.blocks import GRANULE


def expand_rows(
    x: jax.Array,
    bounds: jax.Array,
    shift: jax.Array,
    position: jax.Array,
    *,
    interpret: bool | pltpu.InterpretParams,
    chunk: int | None = None,
) -> jax.Array:
    """x [T, D] bf16, D a multiple of 128, and tables of `routing_windows` -> [T * K, D], whatever
    the bits of x. `chunk` rows are built at a time, a multiple of PART."""
    num_tokens, width = x.shape
    num_blocks, num_groups = shift.shape
    block, top_k = position.shape[0] // num_blocks, position.shape[1]
    num_rows = num_tokens * top_k
    chunk = chunk or chunk_rows(block, top_k, num_groups, width * x.dtype.itemsize, SLOTS)
    lines = layout(block, top_k, num_groups, chunk)
    x = jnp.pad(x, ((0, num_blocks * block - num_tokens), (0, 0)))

    def here(b):
        return b, 0, 0

    def after(b):
        return jnp.minimum(b + 1, num_blocks - 1), 0, 0

    slots = tokens_by_choice(position, num_tokens, num_blocks)
    rows = pl.pallas_call(
        functools.partial(_kernel, lines=lines, chunk=chunk, dynamic=interpret is not True),
        grid=(num_blocks,),
        in_specs=[
            pl.BlockSpec((1, 1, lines.width), here, memory_space=pltpu.SMEM),
            pl.BlockSpec((2, num_groups), lambda b: (0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((1, top_k, block), here),
            pl.BlockSpec((1, top_k, block), after),
            pl.BlockSpec((block, width), lambda b: (b, 0)),
        ],
        out_specs=pl.BlockSpec(memory_space=pltpu.ANY),
        out_shape=jax.ShapeDtypeStruct((-(-num_rows // GRANULE), GRANULE, width), x.dtype),
        scratch_shapes=[
            pltpu.VMEM((stage_granules(chunk, num_groups), GRANULE, width), x.dtype),
            pltpu.VMEM((chunk, block), x.dtype),
            pltpu.VMEM((chunk, block), x.dtype),
            pltpu.VMEM((2, block, width), x.dtype),
            pltpu.SMEM((SLOTS + 1,), jnp.int32),
            pltpu.SemaphoreType.DMA((SLOTS,)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=V6E.vmem_bytes,
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * block * width,
            transcendentals=0,
            bytes_accessed=x.dtype.itemsize * (num_rows + num_tokens) * width,
        ),
        interpret=interpret,
        name="expand_rows",
    )(block_table(bounds, shift, lines, chunk), seam_table(bounds), slots, slots, x)
    return rows.reshape(-1, width)[:num_rows]


def tokens_by_choice(position: jax.Array, num_tokens: int, num_blocks: int) -> jax.Array:
    """[nb * C, K] -> [nb, K, C]; -1, which is no row, for padding."""
    real = jnp.arange(position.shape[0]) < num_tokens
    position = jnp.where(real[:, None], position, -1)
    return position.reshape(num_blocks, -1, position.shape[1]).transpose(0, 2, 1)


def _kernel(
    table,
    seams,
    slots,
    next_slots,
    x,
    rows,
    stage,
    take,
    take_next,
    halves,
    pending,
    sems,
    *,
    lines,
    chunk,
    dynamic,
):
    b = pl.program_id(0)
    num_chunks = table[0, 0, lines.used]
    granules, num_parts = chunk // GRANULE, chunk // PART

    @pl.when(b == 0)
    def _first():
        for i in range(SLOTS + 1):
            pending[i] = 0

        @pl.loop(0, num_parts)
        def _(part):
            select_part(take, slots[0], 0, part)

    by_bytes = _changes(x[...])

    @pl.when(by_bytes)
    def _split():
        bits = pltpu.bitcast(x[...], jnp.int16).astype(jnp.int32)
        for half in range(2):
            halves[half] = (bits >> 8 * half & 0xFF).astype(x.dtype)

    def one_chunk(q, carry):
        at_end = q + 1 == num_chunks
        following = jnp.where(at_end, next_slots[0], slots[0])
        first = jnp.where(at_end, 0, (q + 1) * chunk)
        slot = next_slot(pending, stage, sems, dynamic=dynamic)
        tiles = columns(x.shape[1])

        def build(product):
            for n, cols in enumerate(tiles):
                built = product(cols).reshape(granules, GRANULE, -1)
                stage[pl.ds(slot * granules, granules), :, cols] = built
                # In program order between products, so that both kinds of units have work.
                for part in range(num_parts):
                    if part * len(tiles) // num_parts == n:
                        select_part(take_next, following, first, part)
            take[...] = take_next[...]

        @pl.when(jnp.logical_not(by_bytes))
        def _copy():
            build(lambda cols: dot(take[...], x[:, cols]).astype(stage.dtype))

        @pl.when(by_bytes)
        def _copy_bytes():
            def product(cols):
                low, high = (dot(take[...], halves[i, :, cols]).astype(jnp.int32) for i in (0, 1))
                return pltpu.bitcast((low | high << 8).astype(jnp.int16), stage.dtype)

            build(product)

        pending[slot] = write_windows(
            table, lines, q, slot, chunk, stage, rows, sems.at[slot], dynamic=dynamic
        )
        return carry

    jax.lax.fori_loop(0, num_chunks, one_chunk, 0)

    @pl.when(b == pl.num_programs(0) - 1)
    def _last():
        write_seams(seams, pending, stage, rows, sems, chunk=chunk, dynamic=dynamic)


def _changes(x):
    """Whether a product of bf16 x [C, D] with ones and zeros may change bits: an element is -0,
    infinite or NaN."""
    # Two elements a word; what is asked of each ends in its top bit, without a carry to the next.
    words = pltpu.bitcast(x, jnp.int32)
    top, rows = jnp.int32(-0x7FFF8000), min(GRANULE, words.shape[0])
    found = jnp.zeros((rows, x.shape[1]), jnp.int32)
    for at in range(0, words.shape[0], rows):
        word = words[at : at + rows]
        magnitude = word & 0x7FFF7FFF
        not_finite, is_zero = magnitude + 0x00800080, top - magnitude
        found |= not_finite | is_zero & word
    return jnp.max((found & top != 0).astype(jnp.float32)) > 0
