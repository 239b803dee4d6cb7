"""Grouped matmul in Pallas: out[r] = lhs[r] @ rhs[group of r], groups being runs of rows.

Grid (n, visit). A visit is one row tile of one group (pallas_ops/gmm/visits.py). A tile that a
group boundary cuts is visited once a group, in consecutive steps: its blocks stay in VMEM between
them, and each visit writes its own rows. Invariants:

- every row of a written tile is written by exactly one visit; rows of no group take zeros, or what
  `partial_sum` holds there;
- a row of another visit is kept by a select, never by a product: a NaN there cannot leak;
- only rows near the visit's own are computed: `row_buckets` are the sizes to choose from, so a
  boundary costs what its rows cost, not a tile;
- K is whole, so a product is complete in one step: the matrix units accumulate in fp32 and the
  result is rounded once, on its way to the output block;
- matrices are copied by hand, one ahead: while one is used, the next has that whole time to arrive.
  Mosaic's pipeline would start it only a step ahead, and the last step of a group is often short.

With `transpose_rhs` the weights lie as [G, N, K] and both operands contract their last dimension:
no transposed copy is ever made.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.chips import V6E
from pallas_ops.gmm.products import gate_gradients, gated_products, products
from pallas_ops.gmm.visits import KEEP, Rest, Visits, make_visits
from pallas_ops.tiling import Tiles, choose_gmm_tiles, gmm_vmem_bytes, row_buckets
from pallas_ops.weights import gathered

Gate = Literal["value", "value and product", "gradient"]
"""What becomes of a product on its way out, see gmm."""

_NUM_SLOTS = 2
"""Matrices in VMEM: one in use, one on its way. A power of two, to count in without divisions."""


def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    partial_sum: jax.Array | None = None,
    *,
    transpose_rhs: bool,
    group_offset: int = 0,
    rest: tuple[Rest, Rest] | None = None,
    interpret: bool | pltpu.InterpretParams,
    tiles: Tiles | None = None,
    gate: Gate | None = None,
    gated_from: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """One device. lhs [R, K]; rhs [G, K, N], or [G, N, K] transposed, the matrices of groups
    [group_offset, group_offset + G) of group_sizes int32 [G_all]; partial_sum [R, N] or None.
    Returns ([R, N],), in the memory of partial_sum where XLA can spare it.

    `rest` is for the rows before the groups and after them; None is "keep" with a partial_sum, else
    "zero".

    With a `gate` (products.py) of "value" the columns are a gate's and as many of what it gates,
    and the result is what comes of them, [R, N/2]; "value and product" gives the product [R, N]
    beside it. With "gradient" the product is the gradient of such gated rows, and the result that
    of the [R, 2N] they were `gated_from`, in its memory where XLA can spare it.

    Raises ValueError for tiles that cut K, or N elsewhere than between lanes, or at all with a
    gate, which takes transpose_rhs, no partial_sum, and halves of whole groups of rows.
    """
    num_rows, size_k = lhs.shape
    num_groups = rhs.shape[0]
    size_n = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    widths = {
        None: (size_n,),
        "value": (size_n // 2,),
        "value and product": (size_n // 2, size_n),
        "gradient": (2 * size_n,),
    }[gate]
    if not num_rows:  # no grid step, no block
        return tuple(jnp.zeros((0, width), lhs.dtype) for width in widths)
    rhs = rhs.astype(lhs.dtype)
    itemsize = lhs.dtype.itemsize
    kept = () if partial_sum is None else (partial_sum.astype(lhs.dtype),)
    gated_from = () if gated_from is None else (gated_from,)
    num_columns = sum(widths) + sum(beside.shape[1] for beside in (*kept, *gated_from))
    num_blocks = num_columns / size_n
    if tiles is None:
        sizes = (num_rows, size_k, size_n, num_groups, itemsize)
        tiles = choose_gmm_tiles(*sizes, num_blocks=num_blocks)
    if tiles.tile_k < size_k:
        raise ValueError(f"gmm: tile_k={tiles.tile_k} cuts K={size_k}; give tile_k={size_k}")
    tiles = Tiles(tiles.tile_m, size_k, min(tiles.tile_n, size_n))
    tile_m, tile_n = tiles.tile_m, tiles.tile_n
    num_n = pl.cdiv(size_n, tile_n)
    if num_n > 1 and tile_n % V6E.num_lanes:
        raise ValueError(
            f"gmm: tile_n={tile_n} cuts N={size_n} inside {V6E.num_lanes} lanes; give a multiple "
            f"of them, or tile_n={size_n}"
        )
    num_gated = 2 * size_n if gate == "gradient" else size_n
    shapes = [each.shape for each in gated_from]
    if shapes != ([(num_rows, num_gated)] if gate == "gradient" else []):
        raise ValueError(
            f"gmm: gate={gate!r} with gated_from of shapes {shapes}; give one of "
            f'[{num_rows}, {2 * size_n}] with "gradient", and none otherwise'
        )
    if gate and not (
        transpose_rhs and not kept and num_n == 1 and num_gated % (2 * V6E.row_group) == 0
    ):
        raise ValueError(
            f"gmm: a gate of {num_gated} columns with N={size_n}, transpose_rhs={transpose_rhs}, "
            f"tile_n={tile_n} and {'a' if kept else 'no'} partial_sum; give transpose_rhs, whole "
            f"columns, no partial_sum and columns in whole {2 * V6E.row_group}, or gate afterwards"
        )
    # Copies by hand stop at no edge and take whole tiles of memory: give them those to read.
    rhs_block = [tile_n, size_k] if transpose_rhs else [size_k, tile_n]
    rhs_block = [
        pl.cdiv(size, unit) * unit
        for size, unit in zip(rhs_block, (V6E.row_group, V6E.num_lanes), strict=True)
    ]
    counts = (num_n, 1) if transpose_rhs else (1, num_n)
    padding = [
        (0, count * block - size)
        for count, block, size in zip(counts, rhs_block, rhs.shape[1:], strict=True)
    ]
    if any(after for _, after in padding):
        rhs = jnp.pad(rhs, ((0, 0), *padding))

    if rest is None:
        rest = ("zero",) * 2 if partial_sum is None else ("keep",) * 2
    visits, num_visits = make_visits(
        group_sizes,
        num_rows,
        tile_m,
        group_offset=group_offset,
        num_groups=num_groups,
        rest=rest,
    )
    return pl.pallas_call(
        functools.partial(
            _kernel,
            transpose_rhs=transpose_rhs,
            precision=jax.lax.Precision.HIGHEST if itemsize == 4 else None,
            num_kept=len(kept),
            gate=gate,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(num_n, num_visits),
            in_specs=[
                pl.BlockSpec((tile_m, size_k), lambda n, v, *s: (Visits(*s).lhs_tile[v], 0)),
                pl.BlockSpec(memory_space=pl.ANY),
                *(
                    pl.BlockSpec((tile_m, tile_n), lambda n, v, *s: (Visits(*s).kept_tile[v], n))
                    for _ in kept
                ),
                *(
                    pl.BlockSpec((tile_m, 2 * tile_n), lambda n, v, *s: (Visits(*s).lhs_tile[v], 0))
                    for _ in gated_from
                ),
            ],
            out_specs=tuple(
                pl.BlockSpec(
                    (tile_m, tile_n * width // size_n), lambda n, v, *s: (Visits(*s).tile[v], n)
                )
                for width in widths
            ),
            scratch_shapes=[
                pltpu.VMEM((_NUM_SLOTS, *rhs_block), lhs.dtype),
                pltpu.SemaphoreType.DMA((_NUM_SLOTS,)),
            ],
        ),
        out_shape=tuple(jax.ShapeDtypeStruct((num_rows, w), lhs.dtype) for w in widths),
        input_output_aliases={len(visits) + 2: 0} if kept or gated_from else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            # make_visits bounds every address, whatever the sizes. Checking them again would cost
            # 1 to 2 % of a visit.
            disable_bounds_checks=True,
            vmem_limit_bytes=min(
                V6E.vmem_bytes,
                gmm_vmem_bytes(tiles, itemsize, num_blocks=num_blocks) + V6E.vmem_bytes // 4,
            ),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * size_k * size_n * num_groups // group_sizes.shape[0],
            transcendentals=num_rows * num_gated // 2 if gate else 0,
            bytes_accessed=itemsize * (num_rows * (size_k + num_columns) + rhs.size),
        ),
        interpret=interpret,
        name={None: "gmm", "gradient": "gmm_gate_gradient"}.get(gate, "gmm_gelu_gate"),
    )(*visits, lhs, rhs, *kept, *gated_from)


def _kernel(*refs, transpose_rhs, precision, num_kept, gate):
    num_scalars = len(Visits._fields)
    visits = Visits(*refs[:num_scalars])
    lhs, rhs, *blocks, matrices, arrivals = refs[num_scalars:]
    kept, outs = blocks[:num_kept], blocks[num_kept:]
    if gate == "gradient":
        gated_from, *outs = outs
    visit = pl.program_id(1)
    first, end, rank = visits.first[visit], visits.end[visit], visits.rank[visit]
    tile_m, dtype = outs[0].shape[0], outs[0].dtype

    @pl.when(rank < 0)
    def _rest():
        for out in outs:
            values = jnp.zeros_like(out)
            if kept:
                values = jnp.where(rank == KEEP, kept[0][...], values)
            _store(out, slice(None), slice(None), first, end, values)

    matrix = _arrived(visits, rhs, matrices, arrivals, transpose_rhs)
    # Own rows begin anywhere; memory is addressed by groups of rows.
    start = jax.lax.bitwise_and(first, -V6E.row_group)
    length = jnp.where(rank >= 0, end - start, 0)

    def multiply(num_rows):
        begin = pl.multiple_of(jnp.minimum(start, tile_m - num_rows), V6E.row_group)
        rows = pl.ds(begin, num_rows)
        x, size = lhs[rows, :], outs[0].shape[1]
        if gate == "gradient":
            parts = gate_gradients(x, matrix, gated_from[rows, :], precision, dtype)
        elif gate:
            parts = gated_products(x, matrix, size, len(outs) > 1, precision, dtype)
        else:
            parts = products(x, matrix, size, transpose_rhs, precision, dtype)
        for result, columns, values in parts:
            _store(outs[result], rows, columns, first - begin, end - begin, values)

    # Most visits are of whole tiles: they come first.
    *parts, whole = row_buckets(tile_m)
    largest = parts[-1] if parts else 0

    @pl.when(length > largest)
    def _whole_tile():
        multiply(whole)

    _smallest(parts, length, multiply)


def _smallest(sizes, length, act, below=0):
    """`act` on the smallest of ascending `sizes` that holds `below` < length <= sizes[-1], by
    halves: every branch that is not taken costs its jump."""
    if len(sizes) == 1:
        pl.when((length > below) & (length <= sizes[0]))(lambda: act(sizes[0]))
    elif sizes:
        lower, upper = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]

        @pl.when((length > below) & (length <= sizes[-1]))
        def _halves():
            _smallest(lower, length, act, below)
            _smallest(upper, length, act, lower[-1])


def _arrived(visits, rhs, matrices, arrivals, transpose_rhs):
    """The visit's matrix in VMEM. Its first visit waits for it and sends for the next one; the very
    first sends for both.

    Matrices are used in the order (n, rank) and lie in the slots by turns. A slot is free for the
    next one when its last user's last visit is over, which is before the first visit of this one.
    """
    n, visit = pl.program_id(0), pl.program_id(1)
    rank, num_used = visits.rank[visit], visits.num_used[0]
    tile_n = matrices.shape[1 if transpose_rhs else 2]
    use, num_uses = n * num_used + rank, pl.num_programs(0) * num_used

    def slot_of(use):
        return jax.lax.bitwise_and(use, _NUM_SLOTS - 1)

    def columns_of(group, first):
        columns = pl.ds(first, tile_n)
        return rhs.at[group, columns] if transpose_rhs else rhs.at[group, :, columns]

    def send_for(ahead, _):
        later = (rank + ahead >= num_used).astype(jnp.int32)  # after the last of these columns
        group = visits.order[rank + ahead - later * num_used]
        first = pl.multiple_of((n + later) * tile_n, tile_n)
        slot = slot_of(use + ahead)
        pltpu.make_async_copy(
            columns_of(group, first), matrices.at[slot], arrivals.at[slot]
        ).start()

    before = visits.rank[jnp.maximum(visit - 1, 0)]
    is_first_visit = (rank >= 0) & ((visit == 0) | (before != rank))
    # A loop, because Mosaic jumps over one of no turns. A condition it would compute with all
    # addresses in every visit.
    begin = jnp.where(use == 0, 0, 1)
    end = jnp.where(is_first_visit, jnp.minimum(2, num_uses - use), 0)
    jax.lax.fori_loop(begin, end, send_for, None)

    @pl.when(is_first_visit)
    def _wait():
        slot = slot_of(use)
        pltpu.make_async_copy(columns_of(0, 0), matrices.at[slot], arrivals.at[slot]).wait()

    return matrices.at[slot_of(jnp.maximum(use, 0))]


def _store(out, rows, columns, first, end, values):
    """Writes values to `rows` and `columns` of a block where row `first` <= i < `end` of them."""
    row = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
    own = (row >= first) & (row < end)
    out[rows, columns] = jnp.where(own, values, out[rows, columns])


def gmm_sharded(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    partial_sum: jax.Array | None = None,
    *,
    transpose_rhs: bool,
    group_offset: int = 0,
    weight_axis: str,
    weight_dim: int | None,
    interpret: bool,
) -> tuple[jax.Array]:
    """Inside shard_map: this device's rows against all groups, the weight gathered in the rows'
    dtype.

    lhs [R/n, K]; rhs this device's shard; group_sizes [1, G_all] of this device's rows; partial_sum
    [R/n, N] or None.
    """
    return gmm(
        lhs,
        gathered(rhs, lhs.dtype, weight_axis, weight_dim),
        group_sizes[0],
        partial_sum,
        transpose_rhs=transpose_rhs,
        group_offset=group_offset,
        interpret=interpret,
    )
