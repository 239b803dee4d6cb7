"""Grouped products of an MoE layer in the forms that move weights first. One device.

    python -m benchmarks.baselines.gmm_forms      bytes that each form moves, beside ours

All forms call the same kernels as ours do; what differs is what surrounds them. The bytes are those
of the arrays a form makes, read and written once: what a compiled program must move at least.
"""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp

from pallas_ops.chips import V6E
from pallas_ops.gmm.kernel import gmm
from pallas_ops.tgmm.kernel import tgmm


def concatenated_gate_up(
    lhs: jax.Array, gate: jax.Array, up: jax.Array, group_sizes: jax.Array, *, interpret: bool
) -> tuple[jax.Array]:
    """The first product with gate and up kept apart: their [E, F, D] are joined to one [E, 2F, D]
    at every call. lhs [R, D]; returns ([R, 2F],)."""
    joined = jnp.concatenate([gate, up], axis=1)
    return gmm(lhs, joined, group_sizes, transpose_rhs=True, interpret=interpret)


def transposed_dlhs(
    dout: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, interpret: bool
) -> tuple[jax.Array]:
    """The gradient of lhs by a transposed copy of the weight. dout [R, N], rhs [G, K, N]; returns
    ([R, K],). The barrier keeps XLA from undoing the copy."""
    copy = jax.lax.optimization_barrier(jnp.swapaxes(rhs, 1, 2))
    return gmm(dout, copy, group_sizes, transpose_rhs=False, interpret=interpret)


def padded_tgmm(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, interpret: bool
) -> tuple[jax.Array]:
    """The gradient of a weight whose K is no multiple of the lanes, in a result that is, cut to
    size afterwards. lhs [R, K], rhs [R, N]; returns ([G, K, N],)."""
    size_k = lhs.shape[1]
    padding = -size_k % V6E.num_lanes
    padded = jnp.pad(lhs, ((0, 0), (0, padding)))
    (out,) = tgmm(padded, rhs, group_sizes, out_dtype=str(lhs.dtype), interpret=interpret)
    return (jax.lax.optimization_barrier(out)[:, :size_k],)


def moved_bytes(shape: tuple[int, int, int], itemsize: int = 2) -> int:
    """Bytes that a form moves to make a [G, ., .] copy of weights or gradients: read once, written
    once."""
    return 2 * itemsize * math.prod(shape)


def main() -> None:
    """One JSON object a form: bytes, and seconds at the full bandwidth of memory."""
    for form, shape in (
        ("concatenated gate and up", (128, 1408, 2816)),
        ("transposed gate and up", (128, 1408, 2816)),
        ("transposed down", (128, 704, 2816)),
        ("gradient of down, cut from 768 rows", (128, 704, 2816)),
    ):
        size = moved_bytes(shape)
        seconds = size / V6E.hbm_bytes_per_s
        print(json.dumps({"form": form, "bytes": size, "us_at_least": round(1e6 * seconds, 1)}))


if __name__ == "__main__":
    main()
