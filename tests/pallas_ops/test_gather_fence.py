"""gather_fence: the same values whatever the weights hold, one gather, and an order of events."""

import pytest
import torch
import torch_xla

from pallas_ops import OpSharding, gather_fence
from tests.pallas_ops.processes import on_four_devices

TWO = OpSharding(mesh=(("fsdp", 2),), row_axes=("fsdp",))


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_neither_values_nor_gradients_change(device):
    x = torch.randn(6, 3).to(device).requires_grad_()
    weights = [torch.full(shape, float("nan")).to(device) for shape in ((4, 3, 5), (2, 4, 3, 5))]
    out = gather_fence(x, weights, dtype=torch.bfloat16)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    torch_xla.sync()
    assert torch.equal(out.cpu(), x.cpu())
    assert torch.equal(grad.cpu(), 2 * x.detach().cpu())


WORKER = """
import json
import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from pallas_ops.gather_fence.kernel import gather_fence_sharded
from pallas_ops.gmm.kernel import gmm_sharded
from pallas_ops.split_gmm.kernel import split_gmm_sharded

draw = np.random.default_rng(0)
x = draw.standard_normal((32, 6)).astype(np.float32)
whole = draw.standard_normal((8, 10, 6)).astype(np.float32)
whole[3] = np.inf
whole[5] = np.nan
split = whole.reshape(2, 8, 5, 6)
sizes = np.array([[2, 2, 0, 0, 2, 0, 2, 0]] * 4, np.int32)
layout = {"weight_axis": "fsdp", "weight_dim": 0, "interpret": True}

def run(product, weight, spec):
    def function(x, weight, sizes):
        (fenced,) = gather_fence_sharded(x, weight, dtype="float32", **layout)
        return product(fenced * 2, weight, sizes, transpose_rhs=True, **layout)[0], fenced

    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    rows = PartitionSpec("fsdp")
    specs = {"in_specs": (rows, spec, rows), "out_specs": (rows, rows), "check_vma": False}
    call = jax.jit(jax.shard_map(function, mesh=mesh, **specs))
    out, fenced = call(x, weight, sizes)
    text = call.lower(x, weight, sizes).compile().as_text()
    return {
        "kept": bool((np.asarray(fenced) == x).all()),
        "finite": bool(np.isfinite(out).all()),
        "gathers": sum(" all-gather(" in line for line in text.splitlines()),
    }

print(json.dumps([
    run(gmm_sharded, whole, PartitionSpec("fsdp")),
    run(split_gmm_sharded, split, PartitionSpec(None, "fsdp")),
]))
"""


def test_weights_of_inf_and_nan_reach_nothing_and_are_gathered_once():
    results = on_four_devices(WORKER)
    assert [result.pop("gathers") for result in results] == [1, 2]
    assert results == [{"kept": True, "finite": True}] * 2


X, W = torch.zeros(4, 5), torch.zeros(4, 3, 5)
BAD = {
    "none": ((X, []), {}, "weights is empty; name those to wait for"),
    "rank": ((X, [W[0]]), {}, r"weights\[0\] has shape \[3, 5\]; expected \[E, \., \.\], or"),
    "rows": ((X[:3], [W]), {"sharding": TWO}, "x has 3 rows, which 2 row shards"),
    "shards": ((X, [W, W[:3]]), {"sharding": TWO}, "dim 0 of rhs has size 3, which axis 'fsdp'"),
    "device": ((X, [W.to("meta")]), {}, r"weights\[0\] is on meta but x is on cpu"),
    "integers": ((X, [W.int()]), {}, r"weights\[0\] is torch.int32; convert it to a floating"),
    "dtype": ((X, [W]), {"dtype": torch.int8}, "dtype is torch.int8; give a floating dtype"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    args, kwargs, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        gather_fence(*args, **{"dtype": torch.float32, **kwargs})
