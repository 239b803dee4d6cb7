"""What the kernels that move rows copy, and how often they run their parts, counted by hand."""

import functools

import numpy as np
import pytest

from pallas_ops.combine import kernel as combine
from pallas_ops.permute import kernel as permute
from train.compile.kernels import assumed_routing
from train.compile.static.grid_steps import only_call
from train.compile.static.own_copies import OWN_COPIES
from train.compile.static.profile import known_steps
from train.compile.static.routings import random_windows

TOKENS, CHOICES, EXPERTS, WIDTH = 520, 2, 8, 128
BLOCKS = 3
GRANULE = 8 * WIDTH * 2
X, ROWS = ((TOKENS, WIDTH), "bfloat16"), ((TOKENS * CHOICES, WIDTH), "bfloat16")
WEIGHTS = ((TOKENS, CHOICES), "float32")
TABLES = (
    ((BLOCKS + 1, EXPERTS), "int32"),
    ((BLOCKS, EXPERTS), "int32"),
    ((BLOCKS * 256, CHOICES), "int32"),
    ((BLOCKS * 256, CHOICES), "int32"),
    ((BLOCKS, 3, EXPERTS), "int32"),
)
KERNELS = {
    "combine": (combine.combine_windows, (ROWS, WEIGHTS)),
    "combine backward": (combine.combine_backward_windows, (X, ROWS, WEIGHTS)),
    "permute": (permute.permute_windows, (X,)),
    "permute backward": (permute.unpermute_windows, (ROWS,)),
}


def call_of(name, *, knows=True):
    fn, operands = KERNELS[name]
    signature = (*operands, *TABLES)
    known = assumed_routing(fn, signature) if knows else {}
    return only_call(functools.partial(fn, interpret=False), signature, known)


def steps_of(name):
    call = call_of(name)
    return call, OWN_COPIES[call.name](call)


def own_granules(name):
    """[num_steps] granules that the kernel fetches and writes itself."""
    call, steps = steps_of(name)
    pipeline = call.steps(own_copies=True)
    moved = (steps.grid.fetched - pipeline.fetched, steps.grid.written - pipeline.written)
    return [(bytes_ / GRANULE).tolist() for bytes_ in moved]


@pytest.fixture(scope="module")
def bounds():
    return random_windows(TOKENS, CHOICES, EXPERTS, 256)["bounds"]


def touched(bounds):
    return sum(-(-bounds[1:] // 8) - bounds[:-1] // 8).tolist()


def test_every_expert_has_its_window_of_every_block(bounds):
    assert bounds.shape == (BLOCKS + 1, EXPERTS)
    assert (bounds[-1] - bounds[0]).sum() == TOKENS * CHOICES
    assert ((bounds[1:] - bounds[:-1]).sum(1) == [512, 512, 16]).all()
    skewed = random_windows(TOKENS, CHOICES, EXPERTS, 256, skew=2.0)["bounds"]
    loads = skewed[-1] - skewed[0]
    assert loads[0] == loads.max() and loads[-1] < TOKENS * CHOICES / EXPERTS / 2


@pytest.mark.parametrize("name", ["combine", "permute backward"])
def test_rows_are_read_about_once(name, bounds):
    fetched, written = own_granules(name)
    windows = (-(-bounds[1:] // 8) - bounds[:-1] // 8) * (bounds[1:] > bounds[:-1])
    # All granules that a block's windows touch, but for those that the block before has brought.
    assert fetched[0] == windows[0].sum()
    assert all(windows[b].sum() - EXPERTS <= fetched[b] <= windows[b].sum() for b in (1, 2))
    assert sum(fetched) <= TOKENS * CHOICES / 8 + EXPERTS - 1
    assert written == [0] * BLOCKS


def test_rows_are_written_once_and_shared_granules_mended(bounds):
    fetched, written = own_granules("permute")
    complete = (bounds[1:] // 8 - bounds[:-1] // 8).sum(1)
    # Granules that two experts share are read when all is done, and written again.
    seams = len({end // 8 for end in bounds[-1] if end % 8})
    assert fetched == [0, 0, seams]
    assert written == [complete[0], complete[1], complete[2] + seams]
    windows = (-(-bounds[1:] // 8) - bounds[:-1] // 8) * (bounds[1:] > bounds[:-1])
    fetched, also_written = own_granules("combine backward")
    assert fetched == (windows.sum(1) + np.array([0, 0, seams])).tolist()
    assert also_written == written


@pytest.mark.parametrize("name", KERNELS)
def test_every_region_has_a_name_and_a_count(name):
    _, steps = steps_of(name)
    assert steps.num_steps == BLOCKS and steps.copy_sizes is None
    assert len({visit.name for visit in steps.visits}) == len(steps.visits)
    for visit in steps.visits:
        assert visit.times(steps.grid).shape == (BLOCKS,) and (visit.times(steps.grid) >= 0).all()


@pytest.mark.parametrize("name", KERNELS)
def test_tables_that_are_not_known_are_refused(name):
    call = call_of(name, knows=False)
    with pytest.raises(ValueError, match="argument whose value is not given"):
        OWN_COPIES[call.name](call)


def test_one_step_leaves_no_loop_to_read():
    signature = (((16, WIDTH), "bfloat16"), *(((2, 2), "int32"), ((1, 2), "int32")))
    signature += (((256, 1), "int32"), ((256, 1), "int32"), ((1, 3, 2), "int32"))
    fn = functools.partial(permute.permute_windows, interpret=False)
    call = only_call(fn, signature, assumed_routing(permute.permute_windows, signature))
    with pytest.raises(ValueError, match="expand_rows: a grid of one step leaves no loop"):
        known_steps(call)


def test_groups_are_assumed_random():
    fn, signature = combine.combine_windows, (ROWS, WEIGHTS, *TABLES)
    assert sorted(assumed_routing(fn, signature)) == [2, 6]
    groups = assumed_routing(lambda lhs, group_sizes: None, (ROWS, ((1, 4), "int32")))
    assert groups[1].shape == (1, 4) and groups[1].sum() == TOKENS * CHOICES
    assert groups[1].dtype == np.int32 and len(set(groups[1][0])) > 1
    assert assumed_routing(lambda x: None, (X,)) == {}
