"""Transposed grouped matmul in Pallas: out[g] = lhs_g^T @ rhs_g over the rows of each group.

Grid (k, n, step): an output tile, then the steps of pallas_ops/tgmm/steps.py and one more, which
only sends off the last result. The kernel makes its copies itself. Rows arrive in a ring of
buffers, a few steps ahead. A group's result grows in one of two buffers while that of the group
before leaves from the other, a piece at a time: one [K, N] in fp32 is as long on the wire as the
rows of a whole group. Invariants:

- exactly the rows of a group are read, rounded to the rows that memory is addressed by;
- rows of other groups, and what an earlier step left in the buffer, are zeroed in *both* operands
  by a select: 0 * NaN is NaN;
- groups come in order, each at least once, so group g uses result buffer g % 2, and all pieces of
  group g - 1 have been sent off when group g is done;
- the output has its exact shape; nothing is padded and sliced.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.chips import V6E
from pallas_ops.tgmm.steps import group_steps
from pallas_ops.tgmm.tiling import (
    NUM_BUFFERS,
    choose_tiles,
    copy_sizes,
    piece_rows,
    row_tile,
    tile_columns,
    vmem_bytes,
)
from pallas_ops.tiling import Tiles


def tgmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: str,
    group_offset: int = 0,
    num_groups: int | None = None,
    interpret: bool | pltpu.InterpretParams,
    tiles: Tiles | None = None,
) -> tuple[jax.Array]:
    """One device. lhs [R, K], rhs [R, N] of one dtype, group_sizes int32 [G] of all groups. Returns
    ([num_groups, K, N],), the groups from group_offset on."""
    num_rows, size_k = lhs.shape
    size_n = rhs.shape[1]
    num_groups = group_sizes.shape[0] - group_offset if num_groups is None else num_groups
    itemsize, out_dtype = lhs.dtype.itemsize, jnp.dtype(out_dtype)
    if not num_rows:  # nothing to copy
        return (jnp.zeros((num_groups, size_k, size_n), out_dtype),)
    tiles = tiles or choose_tiles(num_rows, size_k, size_n, itemsize)
    # All is copied in whole row groups and lanes. A row group that an array ends in is added to it;
    # lanes are there in the memory of a TPU, so only an interpreter's arrays need them.
    rows, whole_k = _up(num_rows, V6E.row_group), _up(size_k, V6E.row_group)
    lanes_k, lanes_n = size_k, size_n
    if interpret:
        lanes_k, lanes_n = _up(size_k, V6E.num_lanes), _up(size_n, V6E.num_lanes)
    lhs, rhs = _pad(lhs, rows, lanes_k), _pad(rhs, rows, lanes_n)
    tile_m = row_tile(num_rows, tiles.tile_m)
    tile_k = _up(tile_columns(tiles.tile_k, size_k, "k"), V6E.row_group)
    tile_n = _up(tile_columns(tiles.tile_n, size_n, "n"), V6E.num_lanes)

    piece = piece_rows(tile_k)
    steps = group_steps(
        group_sizes,
        num_rows,
        tile_m=tile_m,
        num_pieces=pl.cdiv(tile_k, piece),
        group_offset=group_offset,
        num_groups=num_groups,
    )
    # fp32 results leave from the accumulators themselves, others from buffers of their own.
    results = [pltpu.VMEM((2, tile_k, tile_n), jnp.float32)]
    if out_dtype != jnp.float32:
        results = [
            pltpu.VMEM((1, tile_k, tile_n), jnp.float32),
            pltpu.VMEM((2, tile_k, tile_n), out_dtype),
        ]
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            size_k=whole_k,
            size_n=_up(size_n, V6E.num_lanes),
            piece=piece,
            precision=jax.lax.Precision.HIGHEST if itemsize == 4 else None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(steps),
            grid=(pl.cdiv(whole_k, tile_k), pl.cdiv(size_n, tile_n), steps.num_steps[0] + 1),
            in_specs=[in_hbm, in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((NUM_BUFFERS, tile_m, _up(tile_k, V6E.num_lanes)), lhs.dtype),
                pltpu.VMEM((NUM_BUFFERS, tile_m, tile_n), rhs.dtype),
                pltpu.SemaphoreType.DMA((NUM_BUFFERS,)),
                pltpu.SemaphoreType.DMA((2,)),
                *results,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((num_groups, whole_k, lanes_n), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=min(V6E.vmem_bytes, vmem_bytes(tiles, itemsize) + V6E.vmem_bytes // 4),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * size_k * size_n,
            transcendentals=0,
            bytes_accessed=itemsize * num_rows * (size_k + size_n)
            + out_dtype.itemsize * num_groups * size_k * size_n,
        ),
        interpret=interpret,
        name="tgmm",
    )(*steps, lhs, rhs)
    return (out[:, :size_k, :size_n],)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pad(x: jax.Array, *shape: int) -> jax.Array:
    return jnp.pad(x, [(0, to - size) for size, to in zip(x.shape, shape, strict=True)])


def _kernel(
    group,
    row,
    skip,
    num_rows,
    num_written,
    num_steps,
    lhs,
    rhs,
    out,
    lhs_ring,
    rhs_ring,
    arrived,
    left,
    *results,
    size_k,
    size_n,
    piece,
    precision,
):
    accs, result = results[0], results[-1]
    num_groups, tile_m = out.shape[0], lhs_ring.shape[1]
    _, tile_k, tile_n = accs.shape
    num_pieces = pl.cdiv(tile_k, piece)
    own_pieces = pl.program_id(0) * num_pieces
    own_k = _Range(pl.program_id(0), tile_k, size_k, V6E.num_lanes)
    own_n = _Range(pl.program_id(1), tile_n, size_n, V6E.num_lanes)

    def copy_rows(step, act):
        """`act` on the copies of a step's rows, in the few sizes that make up any number."""
        slot = jax.lax.rem(step, NUM_BUFFERS)

        def copy(size, first):
            first = pl.multiple_of(first, V6E.row_group)
            of = pl.ds(pl.multiple_of(row[step] + first, V6E.row_group), size)
            to = pl.ds(first, size)

            def copy_columns(source, ring, at, width):
                target = ring.at[slot, to, pl.ds(0, width)]
                act(pltpu.make_async_copy(source.at[of, at], target, arrived.at[slot]))

            own_k.each(functools.partial(copy_columns, lhs, lhs_ring))
            own_n.each(functools.partial(copy_columns, rhs, rhs_ring))

        done, end = 0, (num_rows[step] + V6E.row_group - 1) & -V6E.row_group
        for size in copy_sizes(tile_m):
            count = jax.lax.div(end - done, size)  # `//` would mind signs, at every step
            jax.lax.fori_loop(
                0, count, lambda i, _, size=size, done=done: copy(size, done + i * size), None
            )
            done += count * size

    def copy_pieces(g, begin, end, act):
        """`act` on the copies of pieces [begin, end) of group g's result."""
        slot = jax.lax.rem(g, 2)

        def copy(p, _):
            def copy_block(at_k, height, at_n, width):
                rows = pl.ds(pl.multiple_of(p * piece, piece), height)
                source = result.at[slot, rows, pl.ds(0, width)]
                act(pltpu.make_async_copy(source, out.at[g, at_k, at_n], left.at[slot]))

            _Range(own_pieces + p, piece, size_k, V6E.row_group).each(
                lambda *of_k: own_n.each(lambda *of_n: copy_block(*of_k, *of_n))
            )

        jax.lax.fori_loop(begin, end, copy, None)

    def mask(ring, slot, step, first, size):
        """Zeroes what is not the group's in `size` rows of a buffer."""
        block = ring.at[slot, pl.ds(pl.multiple_of(first, size), size)]
        rows = first + jax.lax.broadcasted_iota(jnp.int32, block.shape, 0)
        own = (rows >= skip[step]) & (rows < num_rows[step])
        block[...] = jnp.where(own, block[...], jnp.zeros_like(block))

    step = pl.program_id(2)
    g, slot = group[step], jax.lax.rem(step, NUM_BUFFERS)
    opens = (step == 0) | (group[jnp.maximum(step - 1, 0)] != g)
    rounds = accs.shape[0] == 1
    acc = accs.at[0 if rounds else jax.lax.rem(g, 2)]

    @pl.when(step == 0)
    def _fill_ring():
        count = jnp.minimum(NUM_BUFFERS - 1, num_steps[0])
        jax.lax.fori_loop(0, count, lambda i, _: copy_rows(i, start), None)

    @pl.when(step + NUM_BUFFERS - 1 < num_steps[0])
    def _fetch_ahead():
        copy_rows(step + NUM_BUFFERS - 1, start)

    @pl.when(opens & (g > 1))
    def _free_result():
        copy_pieces(g - 2, 0, num_pieces, wait)

    @pl.when(g > 0)
    def _write_behind():
        begin = jnp.where(opens, 0, num_written[jnp.maximum(step - 1, 0)])
        copy_pieces(g - 1, begin, num_written[step], start)

    copy_rows(step, wait)

    @pl.when(skip[step] > 0)
    def _mask_front():
        for ring in (lhs_ring, rhs_ring):
            mask(ring, slot, step, 0, V6E.row_group)

    block = min(tile_m, V6E.mxu_width)

    rest = jax.lax.rem(num_rows[step], block)

    @pl.when(rest > 0)
    def _mask_back():
        for ring in (lhs_ring, rhs_ring):
            mask(ring, slot, step, num_rows[step] - rest, block)

    @pl.when((num_rows[step] == 0) & (g < num_groups))
    def _empty():
        acc[...] = jnp.zeros_like(acc)

    def accumulate(size):
        before = jnp.where(opens, jnp.zeros_like(acc), acc[...])
        acc[...] = before + jax.lax.dot_general(
            lhs_ring[slot, :size, :tile_k],
            rhs_ring[slot, :size],
            (((0,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    for size in range(block, tile_m + 1, block):
        is_it = (num_rows[step] > size - block) & (num_rows[step] <= size)
        pl.when(is_it)(functools.partial(accumulate, size))

    if rounds:

        @pl.when((group[step + 1] != g) & (g < num_groups))
        def _round():
            # A few rows at a time: of a whole result the compiler would spill every register.
            for first in range(0, tile_k, V6E.row_group):
                rows = pl.ds(first, V6E.row_group)
                result[jax.lax.rem(g, 2), rows] = acc[rows].astype(result.dtype)

    @pl.when(step == num_steps[0])
    def _finish():
        copy_pieces(num_groups - 1, 0, num_pieces, wait)


def start(copy) -> None:
    """Begins a copy that `wait`, on the same copy made anew, waits for."""
    copy.start()


def wait(copy) -> None:
    """Waits for a copy."""
    copy.wait()


class _Range(NamedTuple):
    """Part `index` of a dimension of `size` cut into parts of `part`, the last one maybe ragged."""

    index: jax.Array
    part: int
    size: int
    granule: int
    """What lengths are rounded up to; parts are multiples of it, unless there is one alone."""

    def each(self, do) -> None:
        """`do(slice, length)`, once for a part of static length; not at all past the dimension."""
        num_whole, rest = divmod(self.size, self.part)
        part, rest = _up(self.part, self.granule), _up(rest, self.granule)
        first = pl.multiple_of(self.index * part, self.granule)
        pl.when(self.index < num_whole)(lambda: do(pl.ds(first, part), part))
        if rest:
            pl.when(self.index == num_whole)(lambda: do(pl.ds(first, rest), rest))


def tgmm_sharded(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: str,
    reduce_dtype: str,
    row_axes: tuple[str, ...],
    weight_axis: str,
    weight_dim: int | None,
    group_offset: int = 0,
    num_groups: int | None = None,
    interpret: bool,
) -> tuple[jax.Array]:
    """Inside shard_map: the sum over devices of each one's gradient, left sharded as the weight is.

    The kernel writes `reduce_dtype` from its fp32 accumulator, so a bf16 reduction never holds a
    second, fp32 copy of the gradient (1,015 MB for one 26B matrix).
    """
    (out,) = tgmm(
        lhs,
        rhs,
        group_sizes[0],
        out_dtype=reduce_dtype,
        group_offset=group_offset,
        num_groups=num_groups,
        interpret=interpret,
    )
    out = sum_over_mesh(out, row_axes=row_axes, weight_axis=weight_axis, weight_dim=weight_dim)
    return (out.astype(out_dtype),)


def sum_over_mesh(
    gradient: jax.Array, *, row_axes: tuple[str, ...], weight_axis: str, weight_dim: int | None
) -> jax.Array:
    """Inside shard_map: each device's gradient of a weight, summed over the axes that split rows
    and left sharded as the weight is."""
    if weight_dim is None:
        return jax.lax.psum(gradient, row_axes)
    # Scatter first: the sum over the other axes then moves a shard, not the whole matrix.
    gradient = jax.lax.psum_scatter(gradient, weight_axis, scatter_dimension=weight_dim, tiled=True)
    others = tuple(axis for axis in row_axes if axis != weight_axis and jax.lax.axis_size(axis) > 1)
    return jax.lax.psum(gradient, others) if others else gradient
