"""What gmm's kernel computes of a visit's rows, part by part: (which result, columns, values).

A matrix unit holds a square of one operand and streams rows of the other. Held squares that are
partly empty waste it: 1408 columns are 5.5 squares. With `transpose_rhs` the other way round is
possible when x fills squares: the matrix's own rows stream, and the result comes transposed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_ops.chips import V6E

Part = tuple[int, slice, jax.Array]
"""(which result, its columns, values [rows, columns])."""


def products(x, matrix, num_columns, transpose_rhs, precision, dtype) -> Iterator[Part]:
    """x [rows, K] times the matrix's num_columns, rounded to dtype. The matrix may be padded."""
    width = V6E.mxu_width
    num_rows, size_k = x.shape
    dot = _dot(precision)
    if transpose_rhs and num_rows % width == 0 and num_columns % width:
        w = matrix[:num_columns, :size_k]
        yield 0, slice(None), dot(w, x, (((1,), (1,)), ((), ()))).astype(dtype).T
        return
    for column in range(0, num_columns, width):
        columns = slice(column, min(column + width, num_columns))
        w = matrix[columns, :size_k] if transpose_rhs else matrix[:size_k, columns]
        contract = (((1,), (1 if transpose_rhs else 0,)), ((), ()))
        yield 0, columns, dot(x, w, contract).astype(dtype)


_PIECE = 1024
"""Columns of a gate whose gradient is made at a time: what is between is alive in VMEM, in fp32."""


def gated_products(x, matrix, size_f, keeps_product, precision, dtype) -> Iterator[Part]:
    """Result 0, [rows, F], is gelu_tanh(x gate^T) * (x up^T) of matrix [2F, K], gate above up; with
    `keeps_product` result 1, [rows, 2F], is both products. The gate is that of the products as
    rounded to dtype, in fp32: what is computed from them in another pass is the same."""
    width = V6E.mxu_width
    num_rows, size_k = x.shape
    dot, contract = _dot(precision), (((1,), (1,)), ((), ()))
    if num_rows % width == 0:
        both = dot(matrix[: 2 * size_f, :size_k], x, contract).astype(dtype)
        yield 0, slice(None), gelu_gate(both[:size_f], both[size_f:]).T
        if keeps_product:
            yield 1, slice(None), both.T
        return
    for gate_columns, up_columns in _pieces(size_f, width):
        gate, up = (
            dot(x, matrix[columns, :size_k], contract).astype(dtype)
            for columns in (gate_columns, up_columns)
        )
        yield 0, gate_columns, gelu_gate(gate, up)
        if keeps_product:
            yield 1, gate_columns, gate
            yield 1, up_columns, up


def gate_gradients(x, matrix, product, precision, dtype) -> Iterator[Part]:
    """Result 0, [rows, 2F], is the gradient of `product` [rows, 2F], gate beside up, where x times
    the matrix's F rows is that of its gated product, rounded to dtype as it is in another pass."""
    width = V6E.mxu_width
    num_rows, size_k = x.shape
    size_f = product.shape[1] // 2
    dot, contract = _dot(precision), (((1,), (1,)), ((), ()))
    if num_rows % width == 0:
        # Halves that begin between lanes begin at whole rows once transposed.
        both = product.T
        for gate_columns, up_columns in _pieces(size_f, _PIECE):
            dout = dot(matrix[gate_columns, :size_k], x, contract).astype(dtype)
            dgate, dup = gelu_gate_gradient(both[gate_columns], both[up_columns], dout)
            yield 0, gate_columns, dgate.T
            yield 0, up_columns, dup.T
        return
    for gate_columns, up_columns in _pieces(size_f, width):
        dout = dot(x, matrix[gate_columns, :size_k], contract).astype(dtype)
        dgate, dup = gelu_gate_gradient(product[:, gate_columns], product[:, up_columns], dout)
        yield 0, gate_columns, dgate
        yield 0, up_columns, dup


def _pieces(size_f, width) -> Iterator[tuple[slice, slice]]:
    """Columns of the gate, at most `width` at a time, and those of what they gate."""
    for first in range(0, size_f, width):
        end = min(first + width, size_f)
        yield slice(first, end), slice(size_f + first, size_f + end)


def gelu_gate(gate, up):
    """gelu_tanh(gate) * up in fp32, rounded once, of their dtype."""
    gated = jax.nn.gelu(gate.astype(jnp.float32), approximate=True) * up.astype(jnp.float32)
    return gated.astype(gate.dtype)


_SLOPE, _CUBE = math.sqrt(2 / math.pi), 0.044715
"""gelu_tanh(g) = g / 2 * (1 + tanh(_SLOPE * (g + _CUBE * g^3)))."""


def gelu_gate_gradient(gate, up, dout):
    """Gradients of gate and up where `dout` is that of gelu_gate, in fp32, rounded once, of their
    dtype."""
    dtype = gate.dtype
    gate, up, dout = (each.astype(jnp.float32) for each in (gate, up, dout))
    square = gate * gate
    tanh = jnp.tanh(gate * (_SLOPE + _SLOPE * _CUBE * square))
    half = 0.5 + 0.5 * tanh
    slope = half + 0.5 * gate * (1 - tanh * tanh) * (_SLOPE + 3 * _SLOPE * _CUBE * square)
    return (dout * up * slope).astype(dtype), (dout * (gate * half)).astype(dtype)


def _dot(precision):
    return functools.partial(
        jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32
    )
