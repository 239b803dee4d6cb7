"""What layers keep for the backward pass, in the host's memory."""

import json
import re
from collections import Counter
from functools import partial

import pytest
import torch
import torch_xla

from tests.train import offload_worker
from tests.train.offload_worker import LAYERS, PERIODS, ROWS, WIDTH
from tests.train.processes import run_module
from torch_gemma4.execution import Execution, Precision
from torch_gemma4.init import init_parameters
from torch_gemma4.model import Gemma4ForCausalLM
from torch_gemma4.presets import micro
from torch_gemma4.recompute import recompute_layer
from train.xla_loop import XlaLoop


@pytest.mark.exhaustive
@pytest.mark.libtpu
def test_v6e_keeps_every_layers_input_on_the_host():
    printed = run_module(offload_worker.__name__)
    in_hbm, on_host, micro_batches = json.loads(printed.splitlines()[-1])
    inputs = PERIODS * (LAYERS + 1) * ROWS * WIDTH * 2
    assert in_hbm["host"] == 0 and on_host["host"] == inputs
    # Of them HBM has at most one period's on its way out and two on their way back.
    assert in_hbm["hbm"] - on_host["hbm"] >= inputs // PERIODS
    # A loop of micro-batches around it keeps one micro-batch's: 12 layers' fp32 inputs.
    assert micro_batches["host"] == 12 * 256 * 128 * 4


def program(offload, policy):
    """HLO of a micro model's gradients, and how many values its outer loop keeps."""
    loop = XlaLoop(offload=offload)
    execution = Execution(
        Precision.uniform(torch.float32),
        attention="kernel",
        loop=loop,
        recompute=partial(recompute_layer, policy=policy),
    )
    model = Gemma4ForCausalLM(micro(), execution)
    init_parameters(model, seed=0)
    ids = torch.randint(0, 64, (2, 16)).to("xla")
    model.to("xla").loss(ids, ids).loss.backward()
    _, outer, *_loss_tiles = loop._traces.values()
    grads = [p.grad for p in model.parameters()]
    hlo = torch_xla._XLAC._get_xla_tensors_hlo(grads)
    return hlo, len(outer.forward.row_shapes) - outer.num_outputs


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "save_attention"])
def test_the_program_is_the_same_but_for_its_marks(policy):
    # No CPU runs it: it is one that does, and marks that change no value.
    plain, num_kept = program(False, policy)
    marked, num_marked = program(True, policy)
    assert num_kept == num_marked > 1
    assert "annotate_device_placement" not in plain
    marks = re.findall(r"annotate_device_placement.*_xla_buffer_placement=\"(\w+)\"", marked)
    assert Counter(marks) == {"pinned_host": num_kept, "device": num_kept}

    def opcodes(text):
        lines = [line for line in text.splitlines() if "annotate_device_placement" not in line]
        return Counter(
            re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = .*? ([\w-]+)\(", "\n".join(lines), re.M)
        )

    assert opcodes(plain) == opcodes(marked)
