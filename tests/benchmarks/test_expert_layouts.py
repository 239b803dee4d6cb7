"""What is read of a compiled program, on one written by hand."""

from types import SimpleNamespace

from benchmarks import expert_layouts

HLO = """HloModule m

ENTRY %main (a: bf16[8,65536], b: bf16[1,8]) -> bf16[32,65536] {
  %a = bf16[8,65536]{1,0} parameter(0)
  %b = bf16[1,8]{1,0} parameter(1)
  %small = bf16[4,8]{1,0} all-gather(%b), replica_groups={{0,1,2,3}}, dimensions={0}
  %begun = (bf16[8,65536]{1,0}, bf16[32,65536]{1,0}) all-gather-start(%a), \
replica_groups={{0,1,2,3}}, dimensions={0}
  %ended = bf16[32,65536]{1,0} all-gather-done(%begun)
  ROOT %waited = bf16[32,65536]{1,0} all-gather(%a), replica_groups={{0,1,2,3}}, dimensions={0}
}
"""


def test_gathers_in_order_and_which_of_them_are_waited_for():
    found = expert_layouts.collectives_of(SimpleNamespace(hlo=HLO))
    size = 32 * 65_536 * 2
    gather = {"kind": "all-gather", "bytes": size}
    assert found == [gather | {"asynchronous": True}, gather | {"asynchronous": False}]
    assert expert_layouts.waited_gather_bytes(found) == size
