"""What the kernels that fill rows from tokens share, inside the kernel: see kernel_expand.py.

`stage` [granules, 8, D] is all row memory: SLOTS chunks, which are filled in turn while the copies
of the others run; then a carried granule for each expert; then one that nothing reads.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.chips import V6E
from pallas_ops.permute.expand_tables import unpack
from pallas_ops.routing.blocks import GRANULE, buffer_rows

SLOTS = 2
"""Chunks in `stage`."""
_MAX_CHUNK = 1024
"""More rows gain nothing: a chunk's fixed cost is a tenth of it by then."""
PART = 128
"""Rows of a chunk that one call of `select_part` decides."""


def chunk_rows(block: int, top_k: int, num_groups: int, row_bytes: int, row_buffers: int) -> int:
    """Rows of a chunk when `row_buffers` chunks of rows are in VMEM: as many as fill a block's
    buffer, at most _MAX_CHUNK, and at most what leaves half of VMEM to everything else."""
    fit = V6E.vmem_bytes // 2 // (row_buffers * row_bytes)
    most = min(_MAX_CHUNK, buffer_rows(block, top_k, num_groups), fit)
    return max(most // PART, 1) * PART


def first_carried(chunk: int, num_groups: int) -> int:
    """The granule of `stage` that is carried for expert 0; `write_seams` needs as many before."""
    return max(SLOTS * chunk // GRANULE, num_groups)


def stage_granules(chunk: int, num_groups: int) -> int:
    """Granules of `stage`."""
    return first_carried(chunk, num_groups) + num_groups + 1


def select_part(take, slots, first, part) -> None:
    """take[r, c] = 1 where buffer row first + r is of token c, else 0, for PART rows r.

    slots [K, C]: buffer rows of the tokens' choices, at most one equal to any row.
    """
    shape = (PART, take.shape[1])
    # 16 bits: twice as many a register; buffers have less than 2^15 rows.
    row = jax.lax.broadcasted_iota(jnp.int16, shape, 0)
    wanted = slots - (first + part * PART)
    found = jnp.zeros(shape, take.dtype)
    for k in range(slots.shape[0]):
        match = jnp.broadcast_to(wanted[k : k + 1], shape).astype(jnp.int16) == row
        found = jnp.where(match, jnp.ones(shape, take.dtype), found)
    take[pl.ds(part * PART, PART)] = found


def columns(width: int) -> list[slice]:
    """Column tiles as wide as the matrix unit."""
    tile = V6E.mxu_width
    return [slice(at, min(at + tile, width)) for at in range(0, width, tile)]


def dot(a, b, *, transpose=False):
    """[M, K] @ [K, N] in fp32, or @ [N, K]^T."""
    contract = (((1,), (1 if transpose else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)


def next_slot(pending, stage, sems, *, dynamic):
    """The slot to fill, once its last copies are done. `pending` [SLOTS + 1] in SMEM: granules of
    each slot that are on their way to HBM, and the slot's number."""
    slot = pending[SLOTS]
    pending[SLOTS] = jnp.where(slot == SLOTS - 1, 0, slot + 1)
    wait_copies(pending[slot], stage, sems.at[slot], dynamic=dynamic)
    pending[slot] = 0
    return slot


def each_window(table, lines, q, act):
    """Sum of act(g, window) over the windows of chunk q."""

    def add(g, total):
        return total + act(g, unpack(table[0, 0, g]))

    begin, end = table[0, 0, lines.begins + q], table[0, 0, lines.ends + q]
    return jax.lax.fori_loop(begin, end, add, 0)


def write_windows(table, lines, q, slot, chunk, stage, rows, sem, *, dynamic):
    """Puts carried rows into the chunk's first granules, carries its open ones, and starts copies
    of all others. Returns how many granules that are."""
    granules = chunk // GRANULE
    base, carried = slot * granules, first_carried(chunk, lines.num_groups)
    nowhere = carried + lines.num_groups
    row = jax.lax.broadcasted_iota(jnp.int32, stage.shape[1:], 0)

    def act(g, its):
        first = its.first - q * granules
        last = first + its.count
        begin, end = jnp.maximum(first, 0), jnp.minimum(last, granules)
        # A window that began in an earlier chunk was merged there.
        kept = jnp.where(first < 0, 0, its.kept)
        head = base + begin
        stage[head] = jnp.where(row < kept, stage[carried + g], stage[head])
        ends_here = (its.open == 1) & (last < granules)
        tail = base + jnp.minimum(end, granules - 1)
        stage[jnp.where(ends_here, carried + g, nowhere)] = stage[tail]

        @pl.when(end > begin)
        def _copy():
            target = table[0, 0, lines.first_granules + g] - first + begin
            start_copy(stage, base + begin, rows, target, end - begin, sem, dynamic=dynamic)

        return jnp.maximum(end - begin, 0)

    return each_window(table, lines, q, act)


def write_seams(seams, pending, stage, rows, sems, *, chunk, dynamic):
    """After the last chunk: waits for every copy, then puts right the granules that experts share.

    The chunks' memory is free by now: expert g uses its granule g.
    """
    num_groups = seams.shape[1]
    carried = first_carried(chunk, num_groups)
    sem = sems.at[0]
    for slot in range(SLOTS):
        wait_copies(pending[slot], stage, sems.at[slot], dynamic=dynamic)

    def seam(g):
        word = seams[1, g]
        return word & 15, word >> 4 & 15, word >> 8 & 1, word >> 9

    def copy(g, target):
        here, there = stage.at[pl.ds(g, 1)], rows.at[pl.ds(seams[0, g], 1)]
        return pltpu.make_async_copy(*((here, there) if target else (there, here)), sem)

    def each(action):
        jax.lax.fori_loop(0, num_groups, lambda g, carry: (action(g, *seam(g)), carry)[1], 0)

    def fetch(g, begin, end, joined, last):
        @pl.when((end > 0) & (joined == 0))
        def _():
            copy(g, target=False).start()

    def fetched(g, begin, end, joined, last):
        @pl.when((end > 0) & (joined == 0))
        def _():
            copy(g, target=False).wait()

    def mend(g, begin, end, joined, last):
        @pl.when(end > 0)
        def _():
            row = jax.lax.broadcasted_iota(jnp.int32, stage.shape[1:], 0)
            own = (row >= begin) & (row < end)
            stage[g] = jnp.where(own, stage[carried + g], stage[g - joined])

            @pl.when(last == 1)
            def _():
                copy(g, target=True).start()

    def written(g, begin, end, joined, last):
        @pl.when((end > 0) & (last == 1))
        def _():
            copy(g, target=True).wait()

    for action in (fetch, fetched, mend, written):
        each(action)


def start_copy(source, at, target, to, count, sem, *, dynamic) -> None:
    """Starts copies of `count` granules from source[at:] to target[to:], in one if `dynamic`: not
    in interpreters that know no slice of dynamic size."""

    def copy(offset, size):
        pltpu.make_async_copy(
            source.at[pl.ds(at + offset, size)], target.at[pl.ds(to + offset, size)], sem
        ).start()

    if dynamic:
        copy(0, count)
    else:
        jax.lax.fori_loop(0, count, lambda i, carry: (copy(i, 1), carry)[1], 0)


def wait_copies(count, buffer, sem, *, dynamic) -> None:
    """Waits for copies of `count` granules in all from or to `buffer`, whichever they are."""

    def copies(size):
        piece = buffer.at[pl.ds(0, size)]
        pltpu.make_async_copy(piece, piece, sem).wait()

    if dynamic:
        pl.when(count > 0)(functools.partial(copies, count))
    else:
        jax.lax.fori_loop(0, count, lambda i, carry: (copies(1), carry)[1], 0)
