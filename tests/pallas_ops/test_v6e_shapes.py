"""Products of every odd shape compile for v6e, not only those of the 26B: a model of other widths
must not meet the compiler's rules about tiles of memory."""

import pytest

from pallas_ops.gmm.shapes import KNOWN_ISSUES, TINY
from tests.pallas_ops.aot import compile_elsewhere

pytestmark = [pytest.mark.libtpu, pytest.mark.slow]

PROGRAMS = """
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


def test_every_shape_compiles():
    compiled = compile_elsewhere(PROGRAMS)
    assert len(compiled) == 3 * (len(TINY) + len(KNOWN_ISSUES) + 2)
    assert {name: r["error"] for name, r in compiled.items() if "error" in r} == {}
