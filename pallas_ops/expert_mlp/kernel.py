"""Experts in Pallas: gmm's kernel three times, twice with the gate inside.

Where a group's whole matrix does not fit VMEM beside its blocks, or F is no whole number of row
groups, the product is gmm's and the gate a pass of XLA's own: the same values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.chips import V6E
from pallas_ops.gmm.kernel import gmm
from pallas_ops.gmm.products import gelu_gate, gelu_gate_gradient
from pallas_ops.tiling import Tiles, choose_gmm_tiles
from pallas_ops.weights import gathered

Interpret = bool | pltpu.InterpretParams


def expert_mlp(
    rows: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    group_sizes: jax.Array,
    *,
    keeps: bool,
    interpret: Interpret,
) -> tuple[jax.Array, ...]:
    """One device. rows [R, D]; gate_up [E, 2F, D], gate rows, then up rows; down [E, F, D];
    group_sizes int32 [E]. Returns (out [R, D],), and with `keeps` hidden [R, F] and the first
    product [R, 2F]."""
    hidden, *product = gmm_gelu_gate(
        rows, gate_up, group_sizes, keeps_product=keeps, interpret=interpret
    )
    out = gmm(hidden, down, group_sizes, transpose_rhs=False, interpret=interpret)
    return (*out, hidden, *product) if keeps else out


def gmm_gelu_gate(
    rows: jax.Array,
    gate_up: jax.Array,
    group_sizes: jax.Array,
    *,
    keeps_product: bool,
    interpret: Interpret,
) -> tuple[jax.Array, ...]:
    """(hidden [R, F], product [R, 2F] if `keeps_product`) of operands as in `expert_mlp`."""
    size_f = gate_up.shape[1] // 2
    # The same tiles whatever is kept: a layer's second run is then its first, bit for bit.
    if tiles := _gate_tiles(rows, gate_up, size_f, num_blocks=1.5):
        return gmm(
            *(rows, gate_up, group_sizes),
            transpose_rhs=True,
            gate="value and product" if keeps_product else "value",
            tiles=tiles,
            interpret=interpret,
        )
    (product,) = gmm(rows, gate_up, group_sizes, transpose_rhs=True, interpret=interpret)
    hidden = gelu_gate(product[:, :size_f], product[:, size_f:])
    return (hidden, product) if keeps_product else (hidden,)


def gmm_gate_gradient(
    dout: jax.Array,
    down: jax.Array,
    product: jax.Array,
    group_sizes: jax.Array,
    *,
    interpret: Interpret,
) -> tuple[jax.Array]:
    """One device. The gradient of product [R, 2F] where dout [R, D] is that of `expert_mlp`."""
    size_f = down.shape[1]
    if tiles := _gate_tiles(dout, down, size_f, num_blocks=4):
        return gmm(
            *(dout, down, group_sizes),
            transpose_rhs=True,
            gate="gradient",
            gated_from=product,
            tiles=tiles,
            interpret=interpret,
        )
    (dhidden,) = gmm(dout, down, group_sizes, transpose_rhs=True, interpret=interpret)
    halves = gelu_gate_gradient(product[:, :size_f], product[:, size_f:], dhidden)
    return (jnp.concatenate(halves, axis=1),)


def _gate_tiles(
    rows: jax.Array, matrices: jax.Array, size_f: int, *, num_blocks: float
) -> Tiles | None:
    """Tiles of a product with matrices [E, N, D] and a gate of F columns inside, None where it must
    be apart."""
    num_groups, size_n, size_k = matrices.shape
    if not rows.shape[0] or size_f % V6E.row_group:
        return None
    sizes = (rows.shape[0], size_k, size_n, num_groups, rows.dtype.itemsize)
    tiles = choose_gmm_tiles(*sizes, num_blocks=num_blocks)
    return tiles if tiles.tile_n >= size_n else None


def expert_mlp_sharded(
    rows: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    group_sizes: jax.Array,
    *,
    keeps: bool,
    weight_axis: str,
    weight_dim: int | None,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Inside shard_map: this device's rows [R/n, D] against all experts, weights gathered in the
    rows' dtype from this device's shards; group_sizes [1, E] of this device's rows."""
    gate_up, down = (gathered(w, rows.dtype, weight_axis, weight_dim) for w in (gate_up, down))
    return expert_mlp(rows, gate_up, down, group_sizes[0], keeps=keeps, interpret=interpret)


def gmm_gate_gradient_sharded(
    dout: jax.Array,
    down: jax.Array,
    product: jax.Array,
    group_sizes: jax.Array,
    *,
    weight_axis: str,
    weight_dim: int | None,
    interpret: bool,
) -> tuple[jax.Array]:
    """Inside shard_map, as `expert_mlp_sharded`."""
    down = gathered(down, dout.dtype, weight_axis, weight_dim)
    return gmm_gate_gradient(dout, down, product, group_sizes[0], interpret=interpret)
