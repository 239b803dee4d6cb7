"""Forward and backward of the loss compiled for one v6e chip: bytes of HBM by number of tiles.

    python -m tests.train.loss_worker TILES ...     one JSON object: tiles to bytes

A process of its own because libtpu reads its environment when it starts.
"""

import json
import sys
from dataclasses import replace

from tests.train.processes import bytecode
from train.compile.command import on_topology
from train.compile.topology import find_topology
from train.launch import prepare_tracing
from train.presets import gemma4_26b_a4b

BATCH, LENGTH, WIDTH, VOCABULARY = 2, 4096, 1024, 65_536


def main(*counts: int) -> None:
    topology = find_topology("v6e-1")
    config = on_topology(gemma4_26b_a4b(), topology)
    config = replace(config, data=replace(config.data, batch_size=BATCH))
    prepare_tracing()
    from train.compile.compiler import compile_step

    print(json.dumps({n: compile_step(traced(config, n), topology).temp_bytes for n in counts}))


def traced(config, num_tiles):
    """The loss and its gradients, as `trace_step` gives a step."""
    import torch
    import torch_xla.runtime as xr
    from torch_xla.core.xla_builder import create_placeholder_tensor

    from torch_gemma4.loss import tiled_cross_entropy
    from train.build import build_execution
    from train.compile.trace import NumberedMesh, TracedStep
    from train.mesh import MeshLayout

    xr.use_spmd()
    layout = MeshLayout(config.mesh, NumberedMesh(config.mesh), target="tpu")
    execution = build_execution(config, layout)
    shapes = ((BATCH, LENGTH, WIDTH), torch.bfloat16), ((VOCABULARY, WIDTH), torch.float32)
    hidden, table = (create_placeholder_tensor(*each).requires_grad_() for each in shapes)
    found = tiled_cross_entropy(
        hidden,
        table,
        table.detach().to(torch.bfloat16),
        create_placeholder_tensor((BATCH, LENGTH), torch.int32),
        softcap=30.0,
        num_tiles=num_tiles,
        loop=execution.loop,
        constrain=execution.constrain,
    )
    gradients = torch.autograd.grad(found.cross_entropy, [hidden, table])
    return TracedStep(bytecode("loss", [found.cross_entropy, *gradients]), 1, (), {})


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
