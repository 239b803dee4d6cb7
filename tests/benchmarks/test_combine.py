"""The dispatch benchmark: what it counts, where that can be counted by hand."""

import numpy as np
import pytest

from benchmarks.combine import Options, hbm_bytes
from benchmarks.combine_model import MODELS, Traffic, steps_of
from benchmarks.combine_programs import SHAPE

HLO = """HloModule m
%fused (p: bf16[8,128]) -> bf16[8,128] {
  %g = bf16[8,128]{1,0:T(8,128)(2,1)} gather(%p, %i)
}

ENTRY %main (a: bf16[8,128]) -> bf16[8,128] {
  %a = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %b = (f32[8,128]{1,0:T(8,128)S(1)}, s32[4]{0:T(128)}) fusion(%a), "estimated_cycles":"70"
  %c = bf16[8,128]{1,0:T(8,128)(2,1)} bitcast(%a)
  ROOT %d = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%c, %b), "estimated_cycles":"5"
}
"""


def test_bytes_of_hbm_leave_out_vmem_and_free_instructions():
    whole, small = 8 * 128 * 2, 4 * 4
    assert hbm_bytes(HLO) == (3 * whole + 2 * small, 75, ["gather"])


def traffic():
    """Three blocks, the second without a row."""
    return Traffic(
        slots=np.array([2048, 0, 2048]),
        ring_rows=np.array([2944, 0, 2048]),
        window_rows=np.array([2944, 0, 2944]),
        windows=np.array([128, 0, 128]),
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_model_covers_every_block_and_names_every_region(name):
    model = MODELS[name]
    steps = steps_of(*model.copies(traffic()))
    assert steps.num_steps == 3
    visits = model.visits(Traffic(*(np.maximum(each, 1) for each in vars(traffic()).values())))
    assert len({visit.name for visit in visits}) == len(visits)
    for visit in visits:
        assert visit.times(steps).shape == (3,) and (visit.times(steps) >= 0).all()


def test_combine_reads_what_the_ring_fetches():
    steps = steps_of(*MODELS["combine"].copies(traffic()))
    assert steps.fetched.sum() == (2944 + 2048) * SHAPE.width * 2
    assert steps.written.tolist() == [256 * SHAPE.width * 2] * 3


def test_unknown_program():
    with pytest.raises(ValueError, match="only='gather' is unknown; use one of"):
        Options(only="gather")
