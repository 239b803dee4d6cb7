"""The figures of benchmarks.gmm on small cases: steps of tgmm, their copies and time, the best."""

import dataclasses

import numpy as np
import pytest

from benchmarks import gmm, kernel_registry, megablox, tgmm_steps
from benchmarks.routings import group_sizes
from pallas_ops.chips import V6E
from pallas_ops.gmm.shapes import GEMMA4_26B as GMM_SHAPES
from pallas_ops.tgmm.shapes import GEMMA4_26B as TGMM_SHAPES
from train.compile.static.schedule import Region, Schedule
from train.compile.static.step_time import CLOCK_HZ

SIZES = np.array([700, 0, 300, 24], np.int32)
K, N = 256, 200


def steps(out_itemsize=4, sizes=SIZES):
    return tgmm_steps.find_steps(sizes, 1024, K, N, out_itemsize)


def test_every_byte_is_counted_once():
    found = steps()
    assert found.group.tolist() == [0, 0, 1, 2, 3, 4]
    # Group 2 begins inside a row group, at row 700: 692 are 12 rows before it, all copied.
    assert found.num_rows.tolist() == [512, 188, 0, 312, 32, 0]
    assert found.skip.tolist() == [0, 0, 0, 12, 8, 0]
    copied = np.array([512, 192, 0, 320, 32, 0])
    assert found.fetched.tolist() == (copied * (256 + 256) * 2).tolist()
    assert found.written.sum() == 4 * K * 256 * 4  # lanes are copied whole
    assert found.pieces.tolist() == [0, 0, 8, 8, 8, 8]
    assert found.blocks.tolist() == [2, 1, 0, 2, 1, 0]
    assert not found.rounds and steps(2).rounds and steps(2).written.sum() == 4 * K * 256 * 2


def test_time_is_the_copies_or_the_bundles():
    found = steps()
    nothing = np.zeros(6)
    moved = found.fetched.sum() + found.written.sum()
    assert tgmm_steps.queue_seconds(nothing, found, 0) == pytest.approx(moved / 1638e9)
    slow = np.full(6, 1e6)
    first, last = found.fetched[0] / V6E.hbm_bytes_per_s, found.written[-1] / V6E.hbm_bytes_per_s
    expected = first + 6e6 / CLOCK_HZ
    # The last result leaves while the last step, which has nothing to do, takes its time.
    assert tgmm_steps.queue_seconds(slow, found, 0) == pytest.approx(expected)
    slow[-1] = 0
    expected = first + 5e6 / CLOCK_HZ + last
    assert tgmm_steps.queue_seconds(slow, found, 0) == pytest.approx(expected)
    assert tgmm_steps.queue_seconds(nothing, found, 1750) == pytest.approx(1e-6 + moved / 1638e9)


def test_a_result_waits_for_its_buffer():
    found = steps(sizes=np.array([256, 256, 256, 256], np.int32))
    # Results so long on the wire that only they count: group 2 begins when group 0's has left.
    long = dataclasses.replace(found, written=np.array([0, 1, 1, 1, 1]) * 1638e6)
    assert tgmm_steps.queue_seconds(np.zeros(5), long, 0) == pytest.approx(4e-3, rel=1e-2)


def test_unknown_regions_and_cut_results():
    region = Region("loop", 0, 4, ())
    ones = np.ones(4)
    schedule = Schedule((region,), (), {"MXU": ones}, {"MXU": 2}, ones, 0)
    with pytest.raises(ValueError, match="the kernel has changed, and so must this file"):
        tgmm_steps.step_sums(schedule, steps(), ones)
    with pytest.raises(ValueError, match="cut K=16384 or N=16384; profile a smaller shape"):
        tgmm_steps.find_steps(SIZES, 1024, 16_384, 16_384, 4)


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
