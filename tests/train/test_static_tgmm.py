"""Steps and the time model of tgmm, against a count by hand."""

import dataclasses
import functools

import numpy as np
import pytest

from pallas_ops.chips import V6E
from pallas_ops.tgmm import kernel
from pallas_ops.tiling import Tiles
from train.compile.static.grid_steps import only_call
from train.compile.static.schedule import Region, Schedule
from train.compile.static.step_time import CLOCK_HZ
from train.compile.static.tgmm_steps import find_steps

SIZES = np.array([700, 0, 300, 24], np.int32)
K, N = 256, 200


def steps(dtype="float32", sizes=SIZES, **static):
    operands = ((1024, K), "bfloat16"), ((1024, N), "bfloat16")
    fn = functools.partial(kernel.tgmm, out_dtype=dtype, interpret=False, **static)
    return find_steps(only_call(fn, (*operands, ((4,), "int32")), {2: sizes}))


def test_every_byte_is_counted_once():
    found = steps()
    assert found.group.tolist() == [0, 0, 1, 2, 3, 4]
    # Group 2 begins inside a row group, at row 700: 692 are 12 rows before it, all copied.
    assert found.num_rows.tolist() == [512, 188, 0, 312, 32, 0]
    assert found.skip.tolist() == [0, 0, 0, 12, 8, 0]
    copied = np.array([512, 192, 0, 320, 32, 0])
    assert found.grid.fetched.tolist() == (copied * (256 + 256) * 2).tolist()
    assert found.grid.written.sum() == 4 * K * 256 * 4  # lanes are copied whole
    assert found.pieces.tolist() == [0, 0, 8, 8, 8, 8]
    assert found.blocks.tolist() == [2, 1, 0, 2, 1, 0]
    assert not found.rounds and steps("bfloat16").rounds
    assert steps("bfloat16").grid.written.sum() == 4 * K * 256 * 2


def test_time_is_the_copies_or_the_bundles():
    found = steps()
    nothing = np.zeros(6)
    moved = found.grid.fetched.sum() + found.grid.written.sum()
    assert found.seconds(nothing, 0)[0] == pytest.approx(moved / 1638e9)
    slow = np.full(6, 1e6)
    first, last = (
        found.grid.fetched[0] / V6E.hbm_bytes_per_s,
        found.grid.written[-1] / V6E.hbm_bytes_per_s,
    )
    expected = first + 6e6 / CLOCK_HZ
    # The last result leaves while the last step, which has nothing to do, takes its time.
    assert found.seconds(slow, 0)[0] == pytest.approx(expected)
    slow[-1] = 0
    expected = first + 5e6 / CLOCK_HZ + last
    assert found.seconds(slow, 0)[0] == pytest.approx(expected)
    assert found.seconds(nothing, 1750)[0] == pytest.approx(1e-6 + moved / 1638e9)


def test_a_result_waits_for_its_buffer():
    found = steps(sizes=np.array([256, 256, 256, 256], np.int32))
    # Results so long on the wire that only they count: group 2 begins when group 0's has left.
    long = dataclasses.replace(
        found, grid=dataclasses.replace(found.grid, written=np.array([0, 1, 1, 1, 1]) * 1638e6)
    )
    assert long.seconds(np.zeros(5), 0)[0] == pytest.approx(4e-3, rel=1e-2)


def test_unknown_regions_and_cut_results():
    region = Region("loop", 0, 4, ())
    ones = np.ones(4)
    schedule = Schedule((region,), (), {"MXU": ones}, {"MXU": 2}, ones, 0)
    with pytest.raises(ValueError, match="the kernel has changed, and so must this file"):
        steps().sums(schedule, ones)
    with pytest.raises(ValueError, match="2 x 1 tiles cut K or N; profile a smaller shape"):
        steps(tiles=Tiles(512, 128, 200))
