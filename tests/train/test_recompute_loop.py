"""Recomputation policies inside the device loop: what an iteration keeps, and what runs again."""

import re
from functools import partial

import torch
import torch_xla

from torch_gemma4.execution import Execution, Precision
from torch_gemma4.init import init_parameters
from torch_gemma4.model import Gemma4ForCausalLM
from torch_gemma4.presets import micro
from torch_gemma4.recompute import recompute_layer
from train.xla_loop import XlaLoop


def rows_kept(trace):
    return [shape for shape, _ in trace.forward.row_shapes[trace.num_outputs :]]


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
