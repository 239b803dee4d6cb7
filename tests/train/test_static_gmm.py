"""Steps and the time model of gmm, against a count by hand."""

import functools

import numpy as np
import pytest

from pallas_ops.chips import V6E
from pallas_ops.gmm import kernel
from pallas_ops.tiling import Tiles
from train.compile.static.gmm_steps import branch_sums, find_steps, sending_sum
from train.compile.static.grid_steps import only_call
from train.compile.static.schedule import Region, Schedule

SIZES = np.array([100, 0, 500, 400, 24], np.int32)  # of 1,024 rows in tiles of 128


def steps_of(known=SIZES, partial_sum=False, **static):
    rows, weight = ((1100, 256), "bfloat16"), ((5, 130, 256), "bfloat16")
    kept = [((1100, 130), "bfloat16")] if partial_sum else []
    fn = functools.partial(kernel.gmm, transpose_rhs=True, interpret=False, **static)
    signature = (rows, weight, ((5,), "int32"), *kept)
    return find_steps(only_call(fn, signature, {} if known is None else {2: known}))


@pytest.fixture(scope="module")
def steps():
    return steps_of()


def test_steps_of_five_groups(steps):
    assert steps.tile_m == 128 and steps.num_own_rows == 1024
    # Tiles 0 to 8; group 0 | group 2 from row 100 | group 3 from 600 | group 4 from 1000 | rest.
    rows = [100, 32, 128, 128, 128, 88, 48, 128, 128, 104, 24]
    # Of tiles 0    0   1    2    3    4   4   5    6    7    7, from the row group of the first.
    assert steps.branch.tolist() == [1 + (r > 64) for r in rows] + [0]
    assert steps.computed_rows == sum(64 if r <= 64 else 128 for r in rows)
    assert np.flatnonzero(steps.opens).tolist() == [0, 1, 6, 10]
    block = 128 * 256 * 2
    assert steps.grid.fetched.tolist() == [block, 0, *[block] * 4, 0, *[block] * 3, 0, 0]
    out = 128 * 256 * 2  # 130 columns in whole lanes
    last = 80 * 256 * 2  # 76 rows in tiles of 8
    assert steps.grid.written.tolist() == [0, *[out] * 4, 0, *[out] * 3, 0, out, last]
    matrix = 144 * 256 * 2  # 130 rows in tiles of memory
    assert steps.matrix_bytes == matrix
    assert steps.dma_bytes == 8 * block + 8 * out + last + 4 * matrix


def test_a_matrix_hides_behind_its_predecessor_or_is_waited_for(steps):
    rate = V6E.hbm_bytes_per_s
    matrix, blocks = (
        steps.matrix_bytes / rate,
        (steps.grid.fetched[0] + steps.grid.written[-1]) / rate,
    )
    slow = np.full(len(steps.branch), 1.0)
    seconds, waiting = steps.seconds(slow)
    assert waiting == 0 and seconds == pytest.approx(len(slow) + matrix + blocks)
    at_once, waiting = steps.seconds(0 * slow)
    assert waiting == len(slow) - 2  # nothing moves in the first visit, nor in tile 7's second
    assert at_once == pytest.approx(steps.dma_bytes / rate)


def test_branches_include_what_is_around_them():
    rest, waits = Region("guard", 6, 9, ()), Region("guard", 20, 24, ())
    sends = Region("loop", 12, 17, (Region("guard", 12, 17, ()),))
    whole, part = Region("guard", 30, 50, ()), Region("guard", 55, 65, ())
    parts = Region("guard", 52, 70, (part,))
    body = Region("guard", 5, 80, (rest, sends, waits, whole, parts))
    loop = Region("loop", 2, 90, (Region("guard", 2, 4, ()), body))
    vmatmuls = np.zeros(100)
    vmatmuls[[35, 60]] = 1
    schedule = Schedule((loop,), (), {}, {}, vmatmuls, 0)
    around = (90 - 2) - 3 - 5 - 20 - 18  # all but the rest, the loop that sends and the products
    expected = [around + 3, around + 8 + 10, around + 20]  # the whole tile's is the last
    assert branch_sums(schedule, np.ones(100), 3).tolist() == expected
    assert sending_sum(schedule, np.ones(100)) == 5
    with pytest.raises(ValueError, match="has 2 products, expected 8: one a row count"):
        branch_sums(schedule, np.ones(100), 9)


def test_columns_in_parts_take_as_many_matrices():
    whole, parts = steps_of(), steps_of(tiles=Tiles(128, 256, 128))
    assert parts.num_steps == 2 * whole.num_steps
    assert parts.opens.tolist() == 2 * whole.opens.tolist()
    # 130 columns in two parts of 128: the copies read whole parts.
    assert parts.matrix_bytes == 128 * 256 * 2
    assert parts.computed_rows == 2 * whole.computed_rows
    assert parts.useful_rows == whole.useful_rows


def test_rows_that_are_kept_are_fetched_too(steps):
    # Tile 7, which group 4 ends in, and 8 beside it; zeros would be written there without them.
    kept = steps_of(partial_sum=True)
    rest = int((kept.branch == 0).sum())
    assert rest == 1 and kept.dma_bytes > steps.dma_bytes - (1100 - 1024) * 256 * 2


def test_tables_that_are_not_known_are_refused():
    with pytest.raises(ValueError, match="argument whose value is not given"):
        steps_of(known=None)
