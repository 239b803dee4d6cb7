"""The two orientations are one computation, and what moves weights is found."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks import orientation
from train.compile import hlo

HLO = """HloModule m

%fused (p: f32[512,1024]) -> f32[1024,512] {
  %p = f32[512,1024]{1,0} parameter(0)
  ROOT %t = f32[1024,512]{1,0} transpose(%p), dimensions={1,0}
}

ENTRY %main (a: f32[512,1024], b: f32[8,8]) -> f32[1024,512] {
  %a = f32[512,1024]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %small = f32[8,8]{1,0} copy(%b)
  %large = f32[512,1024]{1,0} copy(%a)
  ROOT %f = f32[1024,512]{1,0} fusion(%large), kind=kLoop, calls=%fused
}
"""


def test_large_copies_and_transposes_are_found_inside_fusions_too():
    found = orientation.relayouts(hlo.Program(HLO))
    assert [text.split()[0] for text in found] == ["copy", "transpose"]
    assert all(text.endswith("2,097,152 bytes") for text in found)


@pytest.mark.exhaustive
def test_both_orientations_give_one_result():
    draw = np.random.default_rng(0)
    rows, width, hidden, experts = 40, 12, 6, 4
    x, dout = (draw.standard_normal((rows, width)).astype(np.float32) for _ in range(2))
    gate_up = draw.standard_normal((experts, 2 * hidden, width)).astype(np.float32)
    down = draw.standard_normal((experts, hidden, width)).astype(np.float32)
    sizes = np.array([[10, 0, 25, 5]], np.int32)
    mesh = jax.make_mesh((1,), ("fsdp",))
    split = PartitionSpec("fsdp")
    results = []
    for d_last in (True, False):
        weights = [w if d_last else w.swapaxes(1, 2) for w in (gate_up, down)]
        call = functools.partial(orientation.products, d_last=d_last, interpret=True)
        call = jax.shard_map(call, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
        out, dx, *grads = jax.jit(call)(x, *weights, sizes, dout)
        results.append([out, dx, *(g if d_last else g.swapaxes(1, 2) for g in grads)])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
