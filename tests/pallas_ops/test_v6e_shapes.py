"""Kernels of every odd shape compile for v6e, not only those of the 26B: a model of other widths or
a batch of other lengths must not meet the compiler's rules about tiles of memory."""

import pytest

from tests.pallas_ops.aot import compile_elsewhere

pytestmark = [pytest.mark.libtpu, pytest.mark.slow]

PRODUCTS = """
from pallas_ops.gmm import kernel as gmm
from pallas_ops.gmm.shapes import KNOWN_ISSUES, TINY, GmmShape
from pallas_ops.tgmm import kernel as tgmm

DOWN = (
    GmmShape("704 columns", 512, 256, 704, 2, False),
    GmmShape("704 lanes", 512, 704, 256, 2, True),
)

def programs():
    found = {}
    for shape in (*TINY, *KNOWN_ISSUES, *DOWN):
        rows, out = (((shape.num_rows, n), "bfloat16") for n in (shape.size_k, shape.size_n))
        weight, sizes = (shape.rhs_shape, "bfloat16"), ((shape.num_groups,), "int32")
        static = {"transpose_rhs": shape.transpose_rhs}
        found[shape.name] = aot.Program(gmm.gmm, (rows, weight, sizes), static)
        found[f"{shape.name}, onto a result"] = aot.Program(
            gmm.gmm, (rows, weight, sizes, out), static
        )
        found[f"{shape.name}, gradient"] = aot.Program(
            tgmm.tgmm, (rows, out, sizes), {"out_dtype": "float32"}
        )
    return found
"""
ATTENTION = """
from pallas_ops.attention import kernel
from pallas_ops.attention.shapes import TINY

def programs():
    found = {}
    for s in TINY:
        heads = (s.num_heads, s.num_kv_heads)
        q, k = (((s.batch, s.length, n, s.head_dim), "bfloat16") for n in heads)
        lse, ids = ((s.batch, s.num_heads, s.length), "float32"), ((s.batch, s.length), "int32")
        static = {"window": s.window}
        found[s.name] = aot.Program(kernel.attention, (q, k, k, ids), static)
        backward = (q, k, k, q, lse, q, ids)
        found[f"{s.name}, backward"] = aot.Program(kernel.attention_backward, backward, static)
    return found
"""
NORM_ROPE = """
from pallas_ops.norm_rope import kernel
from pallas_ops.norm_rope.shapes import TINY, NormRopeShape

def programs():
    found = {}
    for s in (*TINY, NormRopeShape("no whole tile of rows", 2, 100, 3, 64)):
        x = ((s.batch, s.length, s.num_heads, s.head_dim), "bfloat16")
        weight = [((s.head_dim,), "float32")] * s.scaled
        tables = [((1, s.length, 1, s.head_dim // 2), "float32")] * 2 * s.turned
        static = {"scaled": s.scaled, "turned": s.turned, "eps": 1e-6}
        found[s.name] = aot.Program(kernel.norm_rope, (x, *weight, *tables), static)
        backward = (x, x, *weight, *tables)
        found[f"{s.name}, backward"] = aot.Program(kernel.norm_rope_backward, backward, static)
    return found
"""
SOURCES = {"products": (PRODUCTS, 48), "attention": (ATTENTION, 16), "norm_rope": (NORM_ROPE, 16)}


@pytest.mark.parametrize("name", list(SOURCES))
def test_every_shape_compiles(name):
    source, num_programs = SOURCES[name]
    compiled = compile_elsewhere(source)
    assert len(compiled) == num_programs
    assert {name: r["error"] for name, r in compiled.items() if "error" in r} == {}
