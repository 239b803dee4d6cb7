"""Transposed grouped matmul in Pallas: out[g] = lhs_g^T @ rhs_g over the rows of each group.

Grid (k, n, step). Steps of one group are neighbours (pallas_ops/group_tiles.py), so one fp32
accumulator serves: reset at a group's first step, written at its last. Invariants:

- an empty group has one step with no rows, which writes exact zeros;
- rows of other groups, and past the end of lhs, are zeroed in *both* operands by a select: 0 * NaN
  is NaN;
- the output has its exact shape; nothing is padded and sliced.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.chips import V6E
from pallas_ops.group_tiles import group_tiles
from pallas_ops.tiling import Tiles, choose_tgmm_tiles, tgmm_vmem_bytes


def tgmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: str,
    interpret: bool | pltpu.InterpretParams,
    tiles: Tiles | None = None,
) -> tuple[jax.Array]:
    """One device. lhs [R, K], rhs [R, N] of one dtype, group_sizes int32 [G]. Returns ([G, K,
    N],)."""
    num_rows, size_k = lhs.shape
    size_n = rhs.shape[1]
    num_groups = group_sizes.shape[0]
    itemsize, out_dtype = lhs.dtype.itemsize, jnp.dtype(out_dtype)
    if not num_rows:  # no row tile to visit an empty group with
        return (jnp.zeros((num_groups, size_k, size_n), out_dtype),)
    if tiles is None:
        tiles = choose_tgmm_tiles(
            num_rows, size_k, size_n, num_groups, itemsize, out_dtype.itemsize
        )
    tile_m, tile_k, tile_n = tiles.tile_m, min(tiles.tile_k, size_k), min(tiles.tile_n, size_n)

    meta = group_tiles(group_sizes, num_rows, tile_m, visit_empty=True)
    grid = (pl.cdiv(size_k, tile_k), pl.cdiv(size_n, tile_n), meta.group.shape[0])

    def lhs_index(k, n, step, group, tile, bounds, num_steps):
        return tile[step], k

    def rhs_index(k, n, step, group, tile, bounds, num_steps):
        return tile[step], n

    def out_index(k, n, step, group, tile, bounds, num_steps):
        return group[step], k, n

    vmem = tgmm_vmem_bytes(Tiles(tile_m, tile_k, tile_n), itemsize, out_dtype.itemsize)
    out = pl.pallas_call(
        functools.partial(_kernel, precision=jax.lax.Precision.HIGHEST if itemsize == 4 else None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(meta),
            grid=grid,
            in_specs=[
                pl.BlockSpec((tile_m, tile_k), lhs_index),
                pl.BlockSpec((tile_m, tile_n), rhs_index),
            ],
            out_specs=pl.BlockSpec((1, tile_k, tile_n), out_index),
            scratch_shapes=[pltpu.VMEM((tile_k, tile_n), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((num_groups, size_k, size_n), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=min(V6E.vmem_bytes, vmem + V6E.vmem_bytes // 4),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * size_k * size_n,
            transcendentals=0,
            bytes_accessed=itemsize * num_rows * (size_k + size_n)
            + out_dtype.itemsize * num_groups * size_k * size_n,
        ),
        interpret=interpret,
        name="tgmm",
    )(*meta, lhs, rhs)
    return (out,)


def _kernel(group, tile, bounds, num_steps, lhs, rhs, out, acc, *, precision):
    step = pl.program_id(2)
    tile_m = lhs.shape[0]
    g = group[step]
    last_step = num_steps[0] - 1
    live = step <= last_step
    opens = (step == 0) | (group[jnp.maximum(step - 1, 0)] != g)
    closes = (step == last_step) | (group[jnp.minimum(step + 1, last_step)] != g)

    @pl.when(live & opens)
    def _zero_acc():
        acc[...] = jnp.zeros_like(acc)

    @pl.when(live & (bounds[g + 1] > bounds[g]))
    def _accumulate():
        def own_rows(block):
            rows = tile[step] * tile_m + jax.lax.broadcasted_iota(jnp.int32, block.shape, 0)
            own = (rows >= bounds[g]) & (rows < bounds[g + 1])
            return jnp.where(own, block[...], jnp.zeros_like(block))

        acc[...] += jax.lax.dot_general(
            own_rows(lhs),
            own_rows(rhs),
            (((0,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    @pl.when(live & closes)
    def _store():
        out[0] = acc[...].astype(out.dtype)


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
    interpret: bool,
) -> tuple[jax.Array]:
    """Inside shard_map: the sum over devices of each one's gradient, left sharded as the weight is.

    The kernel writes `reduce_dtype` from its fp32 accumulator, so a bf16 reduction never holds a
    second, fp32 copy of the gradient (1,015 MB for one 26B matrix).
    """
    (out,) = tgmm(lhs, rhs, group_sizes[0], out_dtype=reduce_dtype, interpret=interpret)
    if weight_dim is None:
        out = jax.lax.psum(out, row_axes)
    else:
        # Scatter first: the sum over the other axes then moves a shard, not the whole matrix.
        out = jax.lax.psum_scatter(out, weight_axis, scatter_dimension=weight_dim, tiled=True)
        others = tuple(
            axis for axis in row_axes if axis != weight_axis and jax.lax.axis_size(axis) > 1
        )
        if others:
            out = jax.lax.psum(out, others)
    return (out.astype(out_dtype),)
