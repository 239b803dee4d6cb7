"""Every production product compiles for v6e: VMEM holds its tiles, and no weight is moved first."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_ops.gmm.shapes import GEMMA4_26B as GMM_SHAPES
from pallas_ops.gmm.shapes import R26B
from pallas_ops.tgmm.shapes import GEMMA4_26B as TGMM_SHAPES

pytestmark = [pytest.mark.libtpu, pytest.mark.slow]

PRODUCTS = [shape.name for shape in GMM_SHAPES]
PRODUCTS += [f"{s.name}, {dtype}" for s in TGMM_SHAPES for dtype in ("float32", "bfloat16")]
BRANCH = "branch, forward and backward"
GATED = ["wi forward, gated", "wi forward, gated, product kept"]
GRADIENTS = {
    "wo dlhs, gradient of the gate": "bf16[262144,1408]",
    "gradient of a gate, large matrices": "bf16[8192,8192]",
}
DISPATCH = ["permute", "permute backward", "combine", "combine backward"]
CHAIN = "wi forward, two halves"

# [R, 704] in bf16 as kernels read and write it: rows in memory order, 704 padded to lanes.
HIDDEN_BYTES = R26B * 768 * 2
METADATA_BYTES = 384 << 10
"""Which row tile of which group each step computes, a program; the compiler says 65 to 260 KB."""
TABLE_BYTES = 32_768 * 8 * 4
"""One int32 [T, K]."""


@pytest.fixture(scope="module")
def compiled():
    """Results of aot.py by name."""
    script = Path(__file__).with_name("aot.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {result.pop("name"): result for result in map(json.loads, done.stdout.splitlines())}


def test_each_kernel_within_a_minute(compiled):
    kernels = [*PRODUCTS, *GATED, *GRADIENTS, *DISPATCH]
    assert set(compiled) == {*kernels, CHAIN, BRANCH, "tiles beyond VMEM"}
    assert all(compiled[name]["seconds"] < 60 for name in kernels)


@pytest.mark.parametrize("name", PRODUCTS)
def test_product_fits_vmem_and_moves_no_weight(compiled, name):
    result = compiled[name]
    assert "error" not in result, result["error"]
    # A weight is never copied or transposed. [R, 704] is, where it is the argument or the result of
    # the program: XLA lays those out without padding, column by column when 704 is last, and the
    # kernel wants rows. Inside a program the layout is the kernel's: see the branch below.
    at_the_edge = name.startswith("wo")
    assert result["relayouts"] == ["copy bf16[262144,704]"] * at_the_edge
    assert result["temp_bytes"] <= HIDDEN_BYTES * at_the_edge + METADATA_BYTES


@pytest.mark.parametrize("name", GATED)
def test_a_gated_product_moves_no_weight_and_is_gated_inside(compiled, name):
    result = compiled[name]
    assert "error" not in result, result["error"]
    # The gated rows [R, 704] are the program's result here, as above.
    assert result["relayouts"] == ["copy bf16[262144,704]"]
    product = R26B * 1408 * 2 * ("kept" in name)
    assert result["output_bytes"] - (R26B * 704 * 2 + product) <= 64  # addresses, of two results
    assert result["temp_bytes"] <= HIDDEN_BYTES + METADATA_BYTES


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_of_a_gate_is_made_inside_the_product(compiled, name):
    result = compiled[name]
    assert "error" not in result, result["error"]
    # The result would take the memory of the product, which is the caller's here: one copy.
    copies = [each for each in result["relayouts"] if not each.startswith("copy-start")]
    assert copies == [f"copy {GRADIENTS[name]}"]
    assert result["temp_bytes"] <= METADATA_BYTES


def test_the_second_half_writes_into_the_result_of_the_first(compiled):
    result = compiled[CHAIN]
    assert "error" not in result, result["error"]
    assert result["relayouts"] == []  # a copy of the first result would be one
    assert result["temp_bytes"] <= 4 * METADATA_BYTES


def test_branch_moves_nothing(compiled):
    result = compiled[BRANCH]
    assert "error" not in result, result["error"]
    assert result["relayouts"] == []
    # One [R, 704] is alive beside the results, in whose memory the rest of the branch is made.
    assert result["temp_bytes"] <= HIDDEN_BYTES + 8 * METADATA_BYTES


@pytest.mark.parametrize("name", DISPATCH)
def test_rows_are_moved_by_the_kernel_alone(compiled, name):
    result = compiled[name]
    assert "error" not in result, result["error"]
    # Views of rows by granules cost nothing; tables and weights are laid out anew.
    assert result["relayouts"] == []
    assert result["temp_bytes"] <= 4 * TABLE_BYTES


def test_what_does_not_fit_is_an_error(compiled):
    # The control of the tests above: this client knows the size of VMEM.
    error = compiled["tiles beyond VMEM"]["error"]
    assert "would exceed memory (size=134217728)" in error and "space=vmem" in error
