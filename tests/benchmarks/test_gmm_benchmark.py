"""The figures of benchmarks.gmm on small cases."""

import pytest

from benchmarks import gmm, kernel_registry, megablox
from benchmarks.routings import group_sizes
from pallas_ops.gmm.shapes import GEMMA4_26B as GMM_SHAPES
from pallas_ops.tgmm.shapes import GEMMA4_26B as TGMM_SHAPES


def test_skewed_routings():
    zipf = group_sizes("zipf", 4096, 8)
    harmonic = sum(1 / i for i in range(1, 9))
    assert zipf.sum() == 4096 and zipf.max() == pytest.approx(4096 / harmonic, rel=0.1)
    assert group_sizes("one hot", 4096, 8).tolist() == [0] * 4 + [4096] + [0] * 3


def test_products_and_tiles():
    assert len(gmm.PRODUCTS) == 8 and set(gmm.PRODUCTS) == set(
        kernel_registry.kernels("megablox_26b")
    )
    assert gmm.Options(product="wi").products == [p for p in gmm.PRODUCTS if p.startswith("wi")]
    with pytest.raises(ValueError, match="product='wx' is none of"):
        gmm.Options(product="wx")
    with pytest.raises(ValueError, match="op='tgmm' is profiled with the tiles it chooses"):
        kernel_registry.kernels("tgmm", megablox.candidates(8, 8, is_tgmm=True)[0])


def test_columns_that_fill_a_matrix_unit():
    # 1,408 columns are 5.5 widths; rows of a gradient stream through, 16 at a time.
    by_name = {shape.name: gmm.columns_useful(shape) for shape in (*GMM_SHAPES, *TGMM_SHAPES)}
    assert by_name["wi forward"] == by_name["wi dlhs"] == pytest.approx(5.5 / 6)
    assert by_name["wo forward"] == pytest.approx(2.75 / 3)
    assert by_name["wi drhs"] == by_name["wo drhs"] == 1


def test_best_of_each_routing():
    rows = [
        {"routing": "balanced", "est_us": 3.0},
        {"routing": "zipf", "est_us": 2.0},
        {"error": "no"},
        {"routing": "balanced", "est_us": 1.0},
    ]
    assert [row.get("best") for row in gmm.mark_best(rows)] == [False, True, None, True]
