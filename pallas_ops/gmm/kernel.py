"""Grouped matmul in Pallas: out[r] = lhs[r] @ rhs[group of r], groups being runs of rows.

Grid (n, step, k). A step is one row tile of one group (pallas_ops/group_tiles.py); a tile that a
group boundary cuts is visited once a group, in consecutive steps, so its output block stays in VMEM
between them and each visit writes only the group's own rows. Invariants:

- every row is written: the rows past the last group form a group of their own that stores zeros;
- a row outside the group is kept by a select, never by a product: a NaN there cannot leak;
- k past the end of a ragged last block is zeroed in both operands, for the same reason;
- accumulation is fp32, rounded once at the last k.

With `transpose_rhs` the weights lie as [G, N, K] and both operands contract their last dimension:
the transposed product without a transposed weight (Megablox's backward makes a copy of it instead).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.chips import V6E
from pallas_ops.group_tiles import group_tiles
from pallas_ops.tiling import Tiles, choose_gmm_tiles, gmm_vmem_bytes


def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
    interpret: bool | pltpu.InterpretParams,
    tiles: Tiles | None = None,
) -> tuple[jax.Array]:
    """One device. lhs [R, K]; rhs [G, K, N], or [G, N, K] transposed; group_sizes int32 [G].
    Returns ([R, N],)."""
    num_rows, size_k = lhs.shape
    num_groups = rhs.shape[0]
    size_n = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    if not num_rows:  # no grid step, no block
        return (jnp.zeros((0, size_n), lhs.dtype),)
    rhs = rhs.astype(lhs.dtype)
    itemsize = lhs.dtype.itemsize
    if tiles is None:
        tiles = choose_gmm_tiles(num_rows, size_k, size_n, num_groups, itemsize)
    tile_m, tile_k, tile_n = tiles.tile_m, min(tiles.tile_k, size_k), min(tiles.tile_n, size_n)

    tail = (num_rows - jnp.sum(group_sizes, dtype=jnp.int32))[None]
    meta = group_tiles(jnp.concatenate([group_sizes, tail]), num_rows, tile_m, visit_empty=False)
    grid = (pl.cdiv(size_n, tile_n), meta.group.shape[0], pl.cdiv(size_k, tile_k))

    def lhs_index(n, step, k, group, tile, bounds, num_steps):
        return tile[step], k

    def rhs_index(n, step, k, group, tile, bounds, num_steps):
        g = jnp.minimum(group[step], num_groups - 1)
        return (g, n, k) if transpose_rhs else (g, k, n)

    def out_index(n, step, k, group, tile, bounds, num_steps):
        return tile[step], n

    rhs_block = (1, tile_n, tile_k) if transpose_rhs else (1, tile_k, tile_n)
    vmem = gmm_vmem_bytes(Tiles(tile_m, tile_k, tile_n), itemsize)
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            num_groups=num_groups,
            size_k=size_k,
            transpose_rhs=transpose_rhs,
            precision=jax.lax.Precision.HIGHEST if itemsize == 4 else None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(meta),
            grid=grid,
            in_specs=[
                pl.BlockSpec((tile_m, tile_k), lhs_index),
                pl.BlockSpec(rhs_block, rhs_index),
            ],
            out_specs=pl.BlockSpec((tile_m, tile_n), out_index),
            scratch_shapes=[pltpu.VMEM((tile_m, tile_n), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, size_n), lhs.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=min(V6E.vmem_bytes, vmem + V6E.vmem_bytes // 4),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * size_k * size_n,
            transcendentals=0,
            bytes_accessed=itemsize * (num_rows * (size_k + size_n) + rhs.size),
        ),
        interpret=interpret,
        name="gmm",
    )(*meta, lhs, rhs)
    return (out,)


def _kernel(
    group,
    tile,
    bounds,
    num_steps,
    lhs,
    rhs,
    out,
    acc,
    *,
    num_groups,
    size_k,
    transpose_rhs,
    precision,
):
    step, k = pl.program_id(1), pl.program_id(2)
    tile_m, tile_k = lhs.shape
    g = group[step]
    live = step < num_steps[0]
    first_row = tile[step] * tile_m

    @pl.when(live & (k == 0))
    def _zero_acc():
        acc[...] = jnp.zeros_like(acc)

    @pl.when(live & (g < num_groups))
    def _accumulate():
        x, w = lhs[...], rhs[0]
        if size_k % tile_k:
            in_k = k * tile_k + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < size_k
            x = jnp.where(in_k, x, jnp.zeros_like(x))
            k_dim = 1 if transpose_rhs else 0
            in_k = k * tile_k + jax.lax.broadcasted_iota(jnp.int32, w.shape, k_dim) < size_k
            w = jnp.where(in_k, w, jnp.zeros_like(w))
        acc[...] += jax.lax.dot_general(
            x,
            w,
            (((1,), (1 if transpose_rhs else 0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    @pl.when(live & (k == pl.num_programs(2) - 1))
    def _store():
        rows = first_row + jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
        own = (rows >= bounds[g]) & (rows < bounds[g + 1])
        out[...] = jnp.where(own, acc[...].astype(out.dtype), out[...])


def gmm_sharded(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
    weight_axis: str,
    weight_dim: int | None,
    interpret: bool,
) -> tuple[jax.Array]:
    """Inside shard_map: this device's rows against all groups, the weight gathered in the rows'
    dtype.

    lhs [R/n, K]; rhs this device's shard; group_sizes [1, G] of this device's rows.
    """
    rhs = rhs.astype(lhs.dtype)
    if weight_dim is not None:
        rhs = jax.lax.all_gather(rhs, weight_axis, axis=weight_dim, tiled=True)
    return gmm(lhs, rhs, group_sizes[0], transpose_rhs=transpose_rhs, interpret=interpret)
