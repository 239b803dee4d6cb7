"""Steps and the time model of gmm, against a count by hand."""

import numpy as np
import pytest

from benchmarks.gmm_steps import branch_sums, find_steps
from pallas_ops.chips import V6E
from train.compile.static.schedule import Region, Schedule

SIZES = np.array([100, 0, 500, 400, 24], np.int32)  # of 1,024 rows in tiles of 128


@pytest.fixture(scope="module")
def steps():
    return find_steps(SIZES, 1100, 256, 130, transpose_rhs=True)


def test_steps_of_five_groups(steps):
    assert steps.tiles.tile_m == 128 and steps.num_own_rows == 1024
    # Tiles 0 to 8; group 0 | group 2 from row 100 | group 3 from 600 | group 4 from 1000 | rest.
    rows = [100, 32, 128, 128, 128, 88, 48, 128, 128, 104, 24]
    # Of tiles 0    0   1    2    3    4   4   5    6    7    7, from the row group of the first.
    assert steps.branch.tolist() == [1 + (r > 64) for r in rows] + [0]
    assert steps.computed_rows == sum(64 if r <= 64 else 128 for r in rows)
    assert np.flatnonzero(steps.opens).tolist() == [0, 1, 6, 10]
    block = 128 * 256 * 2
    assert steps.fetched.tolist() == [block, 0, *[block] * 4, 0, *[block] * 3, 0, 0]
    out = 128 * 256 * 2  # 130 columns in whole lanes
    last = (1100 - 1024) * 256 * 2
    assert steps.written.tolist() == [0, *[out] * 4, 0, *[out] * 3, 0, out, last]
    assert steps.matrix_bytes == 130 * 256 * 2
    assert steps.dma_bytes == 8 * block + 8 * out + last + 4 * 130 * 256 * 2


def test_a_matrix_hides_behind_its_predecessor_or_is_waited_for(steps):
    rate = V6E.hbm_bytes_per_s
    matrix, blocks = steps.matrix_bytes / rate, (steps.fetched[0] + steps.written[-1]) / rate
    slow = np.full(len(steps.branch), 1.0)
    seconds, waiting = steps.seconds(slow)
    assert waiting == 0 and seconds == pytest.approx(len(slow) + matrix + blocks)
    at_once, waiting = steps.seconds(0 * slow)
    assert waiting == len(slow) - 2  # nothing moves in the first visit, nor in tile 7's second
    assert at_once == pytest.approx(steps.dma_bytes / rate)


def test_branches_include_what_is_around_them():
    rest, copies = Region("guard", 6, 9, ()), Region("guard", 20, 24, ())
    leaves = [Region("guard", 30, 50, ()), Region("guard", 50, 60, ())]
    half = Region("guard", 25, 70, tuple(leaves))
    body = Region("guard", 5, 80, (rest, copies, half))
    loop = Region("loop", 2, 90, (Region("guard", 2, 4, ()), body))
    vmatmuls = np.zeros(100)
    vmatmuls[[35, 55]] = 1
    schedule = Schedule((loop,), (), {}, {}, vmatmuls, 0)
    around = (90 - 2) - 3 - 45  # all but the rest and the products
    expected = [around + 3, around + 15 + 20, around + 15 + 10]
    assert branch_sums(schedule, np.ones(100), 3).tolist() == expected
    with pytest.raises(ValueError, match="has 2 products, expected 8: one a row count"):
        branch_sums(schedule, np.ones(100), 9)


def test_columns_in_parts_are_refused():
    with pytest.raises(ValueError, match="cut N=100000; profile a smaller shape"):
        find_steps(SIZES, 1024, 4096, 100_000, transpose_rhs=False)
