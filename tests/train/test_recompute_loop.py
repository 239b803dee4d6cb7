"""Recomputation policies inside the device loop: what an iteration keeps, and what runs again."""

import re
from functools import partial

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm

from pallas_ops import attention
from torch_gemma4.execution import Execution, Precision, python_loop
from torch_gemma4.init import init_parameters
from torch_gemma4.model import Gemma4ForCausalLM
from torch_gemma4.presets import micro
from torch_gemma4.recompute import recompute_layer
from train.xla_loop import XlaLoop


def rows_kept(trace):
    return [shape for shape, _ in trace.forward.row_shapes[trace.num_outputs :]]


def body(carry, params, constants):
    """A layer that is attention alone, of 2 heads of 8, and a product."""
    q = (carry @ params["w"]).unflatten(-1, (2, 8))
    new = carry + attention(q, q[:, :, :1], q[:, :, 1:], window=None).flatten(2)
    return new, (new.square().sum()[None],)


def run(loop, layer, device):
    torch.manual_seed(0)
    carry = (0.5 * torch.randn(1, 16, 16)).to(device).requires_grad_()
    w = (0.3 * torch.randn(2, 16, 16)).to(device).requires_grad_()
    new, (energy,) = loop(layer, carry, {"w": w}, ())
    loss = (new * torch.linspace(-1, 1, 16, device=new.device)).sum() + energy.sum()
    return [new, energy, *torch.autograd.grad(loss, (carry, w))]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["loop behind a barrier", "device loop"])
def test_kept_results_give_the_same_values_and_gradients(kind):
    expected = run(python_loop, body, "cpu")
    barrier = xm.optimization_barrier_ if kind == "loop behind a barrier" else None
    loop = python_loop if barrier else XlaLoop()
    layer = recompute_layer(body, policy="save_global_attention", barrier=barrier)
    found = run(loop, layer, "xla")
    xm.unlazy(found)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-4)


def policy_trace(policy):
    """What local layers, in the inner loop, and periods keep for the backward pass of a micro
    model; and the exponentials in the program of its gradients."""
    loop = XlaLoop()
    recompute = partial(recompute_layer, policy=policy)
    execution = Execution(
        Precision.uniform(torch.float32), attention="kernel", loop=loop, recompute=recompute
    )
    model = Gemma4ForCausalLM(micro(), execution)
    init_parameters(model, seed=0)
    ids = torch.randint(0, 64, (2, 16)).to("xla")
    model.to("xla").loss(ids, ids).loss.backward()
    inner, outer, *_loss_tiles = loop._traces.values()
    grads = [p.grad for p in model.parameters()]
    hlo = torch_xla._XLAC._get_xla_tensors_hlo(grads)
    return rows_kept(inner), rows_kept(outer), len(re.findall(r"\bexponential\(", hlo))


@pytest.mark.slow
def test_policies_keep_attention_and_do_not_run_its_forward_kernel_again():
    full, some, most = map(policy_trace, ("full", "save_global_attention", "save_attention"))
    carry = (2, 16, 32)
    local, its_lse = (2, 16, 4, 8), (2, 4, 16)
    kept_global = [carry, (2, 16, 4, 16), (2, 4, 16)]
    assert full[:2] == ([carry], [(2, *carry), carry])
    assert some[:2] == ([carry], [(2, *carry), *kept_global])
    assert most[:2] == (
        [carry, local, its_lse],
        [(2, *carry), (2, *local), (2, *its_lse), *kept_global],
    )
    # One kernel less in the backward loops of global layers, then of local ones.
    assert full[2] - some[2] == some[2] - most[2] > 0
