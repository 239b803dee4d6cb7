"""The dispatch benchmark: what it counts, where that can be counted by hand."""

import pytest

from benchmarks.combine import Options, hbm_bytes

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


def test_unknown_program():
    with pytest.raises(ValueError, match="only='gather' is unknown; use one of"):
        Options(only="gather")
