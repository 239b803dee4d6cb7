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
from pallas_ops.routing.blocks import GRANULE, RING, buffer_rows


def reduce_rows(
    rows: jax.Array,
    weights: jax.Array | None,
    ring: jax.Array,
    fetch: jax.Array,
    *,
    num_tokens: int,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """rows [R, D] bf16, D a multiple of 128; weights [T, K], None = all one; tables of
    `routing_windows` -> [T, D] of rows.dtype: fp32 products and sum, rounded once."""
    num_rows, width = rows.shape
    num_blocks, _, num_groups = fetch.shape
    block, top_k = ring.shape[0] // num_blocks, ring.shape[1]
    lanes = V6E.num_lanes
    pieces = width // lanes
    buffer = buffer_rows(block, top_k, num_groups) // GRANULE
    if num_rows % GRANULE:
        rows = jnp.pad(rows, ((0, -num_rows % GRANULE), (0, 0)))
    granules = rows.reshape(-1, GRANULE, pieces, lanes).transpose(0, 2, 1, 3)

    def scalars(array, index):
        """A line of `array` a block, that of block index(b) in step b."""
        line = array.reshape(num_blocks, 1, -1)
        shape = (1, 1, line.shape[2])
        return line, pl.BlockSpec(shape, lambda b, _: (index(b), 0, 0), memory_space=pltpu.SMEM)

    def here(b):
        return b

    def after(b):
        return jnp.minimum(b + 1, num_blocks - 1)

    inputs = [scalars(fetch, here), scalars(fetch, after)]
    inputs.append(scalars(_addresses(ring, pieces), here))
    if weights is not None:
        weights = weights.astype(jnp.float32)
        weights = jnp.pad(weights, ((0, ring.shape[0] - num_tokens), (0, 0)))
        inputs.append(scalars(weights, here))
    operands, specs = zip(*inputs, strict=True)
    tokens = -(-num_tokens // GRANULE)
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            weighted=weights is not None,
            top_k=top_k,
            buffer=buffer,
            num_groups=num_groups,
            interpret=interpret,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_blocks,),
            in_specs=[*specs, pl.BlockSpec(memory_space=pltpu.ANY)],
            out_specs=pl.BlockSpec(
                (block // GRANULE, pieces, GRANULE, lanes), lambda b, _: (b, 0, 0, 0)
            ),
            scratch_shapes=[
                pltpu.VMEM((RING * buffer, pieces, GRANULE, lanes), rows.dtype),
                pltpu.VMEM((pieces * GRANULE, lanes), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((tokens, pieces, GRANULE, lanes), rows.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=V6E.vmem_bytes,
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * width,
            transcendentals=0,
            bytes_accessed=rows.dtype.itemsize * (num_rows + num_tokens) * width,
        ),
        interpret=interpret,
        name="reduce_rows",
    )(jnp.sum(fetch[:, 2], axis=1, dtype=jnp.int32), *operands, granules)
    return out.transpose(0, 2, 1, 3).reshape(-1, width)[:num_tokens]


def _addresses(ring: jax.Array, pieces: int) -> jax.Array:
    """Where a row's first piece lies in the ring seen as 32-bit words [., 128], times 32, plus the
    left shift that brings the row's half of a word to the top."""
    granule, row = ring // GRANULE, ring % GRANULE
    return (granule * (pieces * GRANULE // 2) + row // 2) * 32 + jnp.where(row % 2, 0, 16)


def _kernel(
    num_fetched, fetch, fetch_after, slots, *refs, weighted, top_k, buffer, num_groups, interpret
):
    weights = refs[0] if weighted else None
    rows, out, ring, sums, arrived = refs[weighted:]
    b, num_blocks = pl.program_id(0), pl.num_programs(0)
    pieces = out.shape[1]
    dynamic = interpret is not True

    def start(table, block):
        first = jax.lax.rem(block, RING) * buffer
        semaphore = arrived.at[jax.lax.rem(block, 2)]
        _fetch(table, num_groups, rows, ring, first, semaphore, dynamic)

    @pl.when(b == 0)
    def _first():
        start(fetch, b)

    @pl.when(b + 1 < num_blocks)
    def _next():
        start(fetch_after, b + 1)

    _wait(num_fetched[b], ring, arrived.at[jax.lax.rem(b, 2)], dynamic)
    simulated = isinstance(interpret, pltpu.InterpretParams)
    read = _simulated_reader(ring) if simulated else _reader(ring)

    # Unrolled where it is compiled, so that loads, sums and addresses of many slots overlap.
    loop = functools.partial(jax.lax.fori_loop, 0, unroll=not interpret)

    def eight_tokens(i, carry):
        def token(j, carry):
            def choice(k, total):
                slot = (i * GRANULE + j) * top_k + k
                row = read(slots[0, 0, slot])
                return total + (row * weights[0, 0, slot] if weighted else row)

            total = jnp.zeros((pieces, out.shape[3]), jnp.float32)
            sums[pl.ds(j, pieces, stride=GRANULE), :] = loop(top_k, choice, total)
            return carry

        loop(GRANULE, token, 0)
        out[i] = sums[...].reshape(out.shape[1:]).astype(out.dtype)
        return carry

    jax.lax.fori_loop(0, out.shape[0], eight_tokens, 0)


def _fetch(table, num_groups, rows, ring, first, arrived, dynamic):
    """Starts the copies of one block's new granules into the ring, from granule `first` on."""

    def window(g, carry):
        source, place, count = (table[0, 0, i * num_groups + g] for i in range(3))

        def copy(start, size):
            pltpu.make_async_copy(
                rows.at[pl.ds(source + start, size)],
                ring.at[pl.ds(first + place + start, size)],
                arrived,
            ).start()

        _granules(count, copy, dynamic)
        return carry

    jax.lax.fori_loop(0, num_groups, window, 0)


def _wait(count, ring, arrived, dynamic):
    """Waits for `count` granules, whichever."""

    def wait(start, size):
        piece = ring.at[pl.ds(0, size)]
        pltpu.make_async_copy(piece, piece, arrived).wait()

    _granules(count, wait, dynamic)


def _granules(count, action, dynamic):
    """action(start, size) for `count` granules at once, or one by one: the plain interpreter knows
    no copies of a size that varies."""
    if dynamic:
        pl.when(count > 0)(lambda: action(0, count))
    else:
        jax.lax.fori_loop(0, count, lambda i, carry: (action(i, 1), carry)[1], 0)


def _reader(ring):
    """Row at an address as fp32 [pieces, 128]."""
    granules, pieces, rows, lanes = ring.shape
    stride = rows // 2  # a word holds two rows
    words = ring.bitcast(jnp.int32).reshape(granules * pieces * stride, lanes)

    def read(address):
        piece = words[pl.ds(address >> 5, pieces, stride=stride), :]
        # bf16 is the upper half of fp32.
        piece = jax.lax.shift_left(piece, address & 31) & jnp.int32(-(1 << 16))
        return jax.lax.bitcast_convert_type(piece, jnp.float32)

    return read


def _simulated_reader(ring):
    """The same for the TPU interpreter, which has no view of memory by words."""
    _, pieces, rows, _ = ring.shape
    per_granule = pieces * rows // 2

    def read(address):
        word = address >> 5
        row = 2 * jax.lax.rem(word, per_granule) + (address & 31 == 0).astype(jnp.int32)
        return ring[word // per_granule, :, row, :].astype(jnp.float32)

    return read
