"""norm_rope in Pallas: one head of a block of rows a grid step.

Reads and writes [B, S, N * H], as projections make it and the attention kernels take it: a head is
a run of lanes, each half of it whole registers, so nothing is transposed and a row's sums stay
inside it. Heads whose halves are no whole registers are padded with zeros, half by half, which
changes no sum.

Grid (batch, row block, head); the tables of a row block are read once for all its heads. The
weight's gradient is summed in one [8, H] fp32 block over the whole grid, whose steps are therefore
sequential; rows of a last block that lie beyond the sequence are left out of it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_ops.chips import V6E

ROWS = 1024
"""Rows of a block: half a megabyte of bf16 for a head of 256, so that a copy costs more than its
start."""
_SUBLANES = 8


def norm_rope(
    x: jax.Array,
    *operands: jax.Array,
    scaled: bool,
    turned: bool,
    eps: float,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array]:
    """One device. x [B, S, N, H]; operands: weight [H] or [1, H] if `scaled`, then cos and sin
    [1 or B, S, 1, H/2] if `turned`. Returns (out like x,)."""
    if not x.size:
        return (x,)
    lanes, heads = _as_lanes(x)
    weight, tables = _operands(operands, x, scaled, turned)
    rows, specs = _specs(lanes, heads, tables)
    out = pl.pallas_call(
        functools.partial(_forward_kernel, scaled=scaled, turned=turned, eps=eps, dim=x.shape[3]),
        grid=(x.shape[0], pl.cdiv(x.shape[1], rows), heads),
        in_specs=specs,
        out_specs=specs[0],
        out_shape=jax.ShapeDtypeStruct(lanes.shape, x.dtype),
        compiler_params=_compiler_params(lanes, heads, rows, num_blocks=2),
        cost_estimate=_cost(lanes, num_passes=2),
        interpret=interpret,
        name="norm_rope",
    )(lanes, weight, *tables)
    return (_from_lanes(out, x),)


def norm_rope_backward(
    dout: jax.Array,
    x: jax.Array,
    *operands: jax.Array,
    scaled: bool,
    turned: bool,
    eps: float,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[jax.Array, jax.Array]:
    """(dx like x, dweight fp32 [1, H], zero without a weight)."""
    head_dim = x.shape[3]
    if not x.size:
        return x, jnp.zeros((1, head_dim), jnp.float32)
    lanes, heads = _as_lanes(x)
    weight, tables = _operands(operands, x, scaled, turned)
    rows, specs = _specs(lanes, heads, tables)
    width = lanes.shape[2] // heads
    dx, dweight = pl.pallas_call(
        functools.partial(
            _backward_kernel,
            scaled=scaled,
            turned=turned,
            eps=eps,
            dim=head_dim,
            length=x.shape[1],
        ),
        grid=(x.shape[0], pl.cdiv(x.shape[1], rows), heads),
        in_specs=[specs[0], *specs],
        out_specs=[specs[0], pl.BlockSpec((_SUBLANES, width), lambda b, i, n: (0, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(lanes.shape, x.dtype),
            jax.ShapeDtypeStruct((_SUBLANES, width), jnp.float32),
        ],
        compiler_params=_compiler_params(lanes, heads, rows, num_blocks=3),
        cost_estimate=_cost(lanes, num_passes=3),
        interpret=interpret,
        name="norm_rope_backward",
    )(_as_lanes(dout)[0], lanes, weight, *tables)
    return _from_lanes(dx, x), _unpad(jnp.sum(dweight, axis=0, keepdims=True), head_dim)


def _forward_kernel(x, weight, *rest, scaled, turned, eps, dim):
    *tables, out = rest
    (first, second), _ = _normed(x, eps, dim)
    if scaled:
        w_first, w_second = _halves(weight)
        first, second = first * w_first, second * w_second
    if turned:
        cos, sin = (table[0] for table in tables)
        first, second = first * cos - second * sin, second * cos + first * sin
    _store(out, first, second)


def _backward_kernel(dout, x, weight, *rest, scaled, turned, eps, dim, length):
    *tables, dx, dweight = rest
    normed, inverse = _normed(x, eps, dim)
    first, second = _halves(dout.at[0])
    if turned:
        cos, sin = (table[0] for table in tables)
        first, second = first * cos + second * sin, second * cos - first * sin
    grads = [first, second]

    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _start():
        dweight[...] = jnp.zeros_like(dweight)

    if scaled:
        rows = first.shape[0]
        products = [grad * norm for grad, norm in zip(grads, normed, strict=True)]
        if length % rows:
            row = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0) + pl.program_id(1) * rows
            products = [jnp.where(row < length, product, 0.0) for product in products]
        for half, product in enumerate(products):
            width = product.shape[1]
            # Registers are added to registers; the last sum, inside one, is left to the end.
            sums = jnp.sum(product.reshape(-1, _SUBLANES, width), axis=0)
            dweight[:, half * width : (half + 1) * width] += sums
        grads = [grad * w for grad, w in zip(grads, _halves(weight), strict=True)]
    along = sum(
        jnp.sum(grad * norm, axis=1, keepdims=True)
        for grad, norm in zip(grads, normed, strict=True)
    )
    along = along / dim
    _store(dx, *(inverse * (grad - norm * along) for grad, norm in zip(grads, normed, strict=True)))


def _normed(x, eps, dim):
    """Halves [rows, half] of a head over its root mean square, and one over that [rows, 1]."""
    halves = _halves(x.at[0])
    total = sum(jnp.sum(half * half, axis=1, keepdims=True) for half in halves)
    inverse = jax.lax.rsqrt(total / dim + eps)
    return [half * inverse for half in halves], inverse


def _halves(x):
    """The two halves of a block's lanes, in fp32."""
    width = x.shape[1] // 2
    return [x[:, at].astype(jnp.float32) for at in (slice(width), slice(width, 2 * width))]


def _store(out, first, second):
    width = first.shape[1]
    out[0, :, :width] = first.astype(out.dtype)
    out[0, :, width:] = second.astype(out.dtype)


def _specs(lanes, heads, tables):
    """(rows of a block, the blocks of x, the weight and the tables)."""
    _, length, total = lanes.shape
    width = total // heads
    rows = min(ROWS, -(-length // V6E.row_group) * V6E.row_group)
    block = pl.BlockSpec((1, rows, width), lambda b, i, n: (b, i, n))
    weight = pl.BlockSpec((1, width), lambda b, i, n: (0, 0))
    shared = bool(tables) and tables[0].shape[0] == 1
    table = pl.BlockSpec((1, rows, width // 2), lambda b, i, n: (0 if shared else b, i, 0))
    return rows, [block, weight, *[table] * len(tables)]


def _operands(operands, x, scaled, turned):
    """The weight [1, whole registers], ones if there is none, and the tables [1 or B, S, half]."""
    operands = list(operands)
    head_dim = x.shape[3]
    weight = operands.pop(0) if scaled else jnp.ones((head_dim,))
    padded = _pad(weight.astype(jnp.float32).reshape(1, -1), 2).reshape(1, -1)
    half = _half_width(head_dim)
    tables = [
        jnp.pad(t[:, :, 0].astype(jnp.float32), ((0, 0), (0, 0), (0, half - head_dim // 2)))
        for t in (operands if turned else ())
    ]
    return padded, tables


def _half_width(head_dim):
    return -(-head_dim // 2 // V6E.num_lanes) * V6E.num_lanes


def _pad(x, num_halves):
    """[..., H] -> [..., 2, whole registers], zeros after each half."""
    half = x.shape[-1] // num_halves
    x = x.reshape(*x.shape[:-1], num_halves, half)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, _half_width(2 * half) - half)])


def _unpad(x, head_dim):
    """Inverse of `_pad` with its last two dimensions as one."""
    return x.reshape(*x.shape[:-1], 2, -1)[..., : head_dim // 2].reshape(*x.shape[:-1], head_dim)


def _as_lanes(x):
    """[B, S, N, H] -> ([B, S, N * whole registers], N)."""
    return _pad(x, 2).reshape(*x.shape[:2], -1), x.shape[2]


def _from_lanes(x, like):
    """Inverse of `_as_lanes`."""
    return _unpad(x.reshape(*like.shape[:3], -1), like.shape[3])


def _compiler_params(lanes, heads, rows, *, num_blocks):
    width = lanes.shape[2] // heads
    # Blocks and tables in two buffers each, and about six fp32 values of a block at once.
    vmem = rows * width * (2 * num_blocks * lanes.dtype.itemsize + 2 * 4 + 6 * 4)
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary", "arbitrary", "arbitrary"),
        vmem_limit_bytes=min(V6E.vmem_bytes, vmem + V6E.vmem_bytes // 8),
    )


def _cost(lanes, *, num_passes):
    return pl.CostEstimate(
        flops=8 * num_passes * lanes.size,
        transcendentals=0,
        bytes_accessed=num_passes * lanes.size * lanes.dtype.itemsize,
    )
