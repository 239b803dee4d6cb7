"""Rows to tokens in Pallas: out[t] = sum over k of w[t, k] * rows[row of (t, k)].

Rows arrive in granules: 8 rows by 128 columns are one memory tile, so the view [R / 8, D / 128, 8,
128] of [R, D] moves nothing, a copy of whole granules needs no alignment, and one row is 128-wide
pieces at a fixed stride: a few strided loads. So no product selects rows; each slot loads its row
from VMEM, weighs it by a scalar and adds it, in fp32 like the reference.

One grid step is a block of C tokens (pallas_ops/routing/windows.py). Three buffers in a ring hold
the rows of blocks b - 1, b and b + 1:

- step b starts the copies of block b + 1, whose buffer held block b - 2, then waits for its own;
- the last granule of a window, which most often is the first of the next block's, is fetched once:
  block b reads it in the buffer of b - 1. So every granule of `rows` is read about once.

Rows are only read where a slot points, so nothing depends on what memory held before.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.chips import V6E
from pallas_ops.routing.windows import GRANULE, RING, buffer_rows

_WAIT = 16
"""Granules that one wait is for, as long as so many are left."""


def reduce_rows(
    rows: jax.Array,
    weights: jax.Array | None,
    bounds: jax.Array,
    shift: jax.Array,
    ring: jax.Array,
    *,
    num_tokens: int,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """rows [R, D] bf16 or fp32, D a multiple of 128; weights [T, K], None = all one; tables of
    `routing_windows` -> [T, D] of rows.dtype: fp32 products and sum, rounded once."""
    num_rows, width = rows.shape
    num_blocks, num_groups = shift.shape
    block, top_k = ring.shape[0] // num_blocks, ring.shape[1]
    lanes = V6E.num_lanes
    pieces = width // lanes
    buffer = buffer_rows(block, top_k, num_groups) // GRANULE
    if num_rows % GRANULE:
        rows = jnp.pad(rows, ((0, -num_rows % GRANULE), (0, 0)))
    granules = rows.reshape(-1, GRANULE, pieces, lanes).transpose(0, 2, 1, 3)

    slots = (num_blocks, 1, block * top_k)
    slot_spec = pl.BlockSpec((1, 1, slots[2]), lambda b, *_: (b, 0, 0), memory_space=pltpu.SMEM)
    operands, specs = [_addresses(ring, pieces, rows.dtype).reshape(slots)], [slot_spec]
    if weights is not None:
        weights = weights.astype(jnp.float32)
        weights = jnp.pad(weights, ((0, ring.shape[0] - num_tokens), (0, 0)))
        operands.append(weights.reshape(slots))
        specs.append(slot_spec)
    tokens = -(-num_tokens // GRANULE)
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            weighted=weights is not None,
            top_k=top_k,
            buffer=buffer,
            simulated=isinstance(interpret, pltpu.InterpretParams),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_blocks,),
            in_specs=[*specs, pl.BlockSpec(memory_space=pltpu.ANY)],
            out_specs=pl.BlockSpec(
                (block // GRANULE, pieces, GRANULE, lanes), lambda b, *_: (b, 0, 0, 0)
            ),
            scratch_shapes=[
                pltpu.VMEM((RING * buffer, pieces, GRANULE, lanes), rows.dtype),
                pltpu.VMEM((pieces * GRANULE, lanes), jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((tokens, pieces, GRANULE, lanes), rows.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=V6E.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * width,
            transcendentals=0,
            bytes_accessed=rows.dtype.itemsize * (num_rows + num_tokens) * width,
        ),
        interpret=interpret,
        name="reduce_rows",
    )(bounds, shift, *operands, granules)
    return out.transpose(0, 2, 1, 3).reshape(-1, width)[:num_tokens]


def _addresses(ring: jax.Array, pieces: int, dtype) -> jax.Array:
    """Where a row's first piece lies in the ring seen as 32-bit words [., 128], times 32, plus the
    left shift that brings the row's half of a word to the top."""
    granule, row = ring // GRANULE, ring % GRANULE
    if dtype.itemsize == 4:
        return (granule * (pieces * GRANULE) + row) * 32
    return (granule * (pieces * GRANULE // 2) + row // 2) * 32 + jnp.where(row % 2, 0, 16)


def _kernel(bounds, shift, slots, *refs, weighted, top_k, buffer, simulated):
    weights = refs[0] if weighted else None
    rows, out, ring, sums, counts, arrived = refs[weighted:]
    b, num_blocks = pl.program_id(0), pl.num_programs(0)
    pieces = out.shape[1]

    @pl.when(b == 0)
    def _first():
        counts[0] = _fetch(0, bounds, shift, rows, ring, arrived.at[0], buffer)

    @pl.when(b + 1 < num_blocks)
    def _next():
        after = jax.lax.rem(b + 1, 2)
        counts[after] = _fetch(b + 1, bounds, shift, rows, ring, arrived.at[after], buffer)

    here = jax.lax.rem(b, 2)
    _wait(counts[here], ring, arrived.at[here])

    read = _simulated_reader(ring) if simulated else _reader(ring)

    def eight_tokens(i, carry):
        for j in range(GRANULE):
            total = jnp.zeros((pieces, out.shape[3]), jnp.float32)
            for k in range(top_k):
                slot = (i * GRANULE + j) * top_k + k
                row = read(slots[0, 0, slot])
                total += row * weights[0, 0, slot] if weighted else row
            sums[pl.ds(j, pieces, stride=GRANULE), :] = total
        out[i] = sums[...].reshape(out.shape[1:]).astype(out.dtype)
        return carry

    jax.lax.fori_loop(0, out.shape[0], eight_tokens, 0)


def _fetch(b, bounds, shift, rows, ring, arrived, buffer):
    """Starts the copies of block b's new granules; returns their number."""
    base = jax.lax.rem(b, RING) * buffer

    def window(g, total):
        first_row, end_row = bounds[b, g], bounds[b + 1, g]
        head = first_row >> 3
        # Fetched by the block before as its last: see `held` in windows.py.
        before = bounds[jnp.maximum(b - 1, 0), g]
        held = (head << 3 >= before) & (head << 3 < first_row)
        first = head + held.astype(jnp.int32)
        count = jnp.where(end_row > first_row, (end_row + GRANULE - 1 >> 3) - first, 0)
        target = base + first + (shift[b, g] >> 3)

        def copy(start, size):
            pltpu.make_async_copy(
                rows.at[pl.ds(first + start, size)], ring.at[pl.ds(target + start, size)], arrived
            ).start()

        def pair(i, carry):
            copy(2 * i, 2)
            return carry

        jax.lax.fori_loop(0, count >> 1, pair, 0)

        @pl.when(count & 1 == 1)
        def _last():
            copy(count - 1, 1)

        return total + count

    return jax.lax.fori_loop(0, shift.shape[1], window, jnp.int32(0))


def _wait(count, ring, arrived):
    """Waits for `count` granules."""

    def wait(size):
        def body(i, carry):
            piece = ring.at[pl.ds(0, size)]
            pltpu.make_async_copy(piece, piece, arrived).wait()
            return carry

        return body

    jax.lax.fori_loop(0, count // _WAIT, wait(_WAIT), 0)
    jax.lax.fori_loop(0, jax.lax.rem(count, _WAIT), wait(1), 0)


def _reader(ring):
    """Row at an address as fp32 [pieces, 128]."""
    _, pieces, rows, lanes = ring.shape
    packed = ring.dtype.itemsize == 2
    stride = rows // 2 if packed else rows
    words = (ring.bitcast(jnp.int32) if packed else ring).reshape(-1, lanes)

    def read(address):
        piece = words[pl.ds(address >> 5, pieces, stride=stride), :]
        if not packed:
            return piece
        # bf16 is the upper half of fp32.
        piece = jax.lax.shift_left(piece, address & 31) & jnp.int32(-(1 << 16))
        return jax.lax.bitcast_convert_type(piece, jnp.float32)

    return read


def _simulated_reader(ring):
    """The same for the TPU interpreter, which has no view of memory by words."""
    _, pieces, rows, _ = ring.shape
    packed = ring.dtype.itemsize == 2
    per_granule = pieces * rows // (2 if packed else 1)

    def read(address):
        word = address >> 5
        row = jax.lax.rem(word, per_granule)
        row = 2 * row + (address & 31 == 0).astype(jnp.int32) if packed else row
        return ring[word // per_granule, :, row, :].astype(jnp.float32)

    return read
