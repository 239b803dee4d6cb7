"""Two of Muon's steps on 4 virtual devices, in a process of its own, without a model.

    python -m tests.train.muon_worker OUT.npz

Arrays: value/<parameter> after the steps, spec/<parameter> and of its first moment, as text.
"""

from __future__ import annotations

import functools
import sys

import numpy as np

SHAPES = {
    "stack.segments.0.attention.q_proj.weight": (2, 1, 16, 8),
    "stack.segments.0.mlp.gate_up_proj.weight": (2, 1, 16, 8),
    "stack.segments.0.experts.gate_up": (2, 1, 4, 16, 8),
    "stack.segments.0.experts.down": (2, 1, 4, 8, 8),
    "embedding.weight": (16, 8),
}
NUM_STEPS = 2


def draws():
    """A tensor for every parameter, anew each time it is asked."""
    import torch

    generator = torch.Generator().manual_seed(0)
    while True:
        yield {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def make_optimizer(parameters, **options):
    import torch

    from train.build import decays
    from train.config import OptimConfig
    from train.muon import Muon

    config = OptimConfig(name="muon", learning_rate=0.1, warmup_steps=0)
    return Muon(parameters, config, 9, decays=decays, dtype=torch.float32, **options)


def main() -> None:
    from train.config import MeshConfig
    from train.launch import prepare_environment

    config = MeshConfig(fsdp=4)
    prepare_environment(config)
    import torch_xla
    from torch import nn

    from train.build import sharded_zeros
    from train.mesh import DeviceMesh
    from train.step import pin_state

    mesh = DeviceMesh(config)

    def place(values):
        return {n: mesh.place(v, mesh.parameter_spec(n, v)) for n, v in values.items()}

    stream = draws()
    parameters = {name: nn.Parameter(value) for name, value in place(next(stream)).items()}
    zeros = functools.partial(sharded_zeros, mesh)
    optimizer = make_optimizer(parameters, whole=mesh.whole_matrices, zeros_like=zeros)
    torch_xla.sync()
    for _ in range(NUM_STEPS):
        for name, grad in place(next(stream)).items():
            parameters[name].grad = grad
        optimizer.step()
        pin_state(optimizer, mesh)
        torch_xla.sync()
    spec_of = torch_xla._XLAC._get_xla_sharding_spec
    results = {f"value/{name}": p.detach().cpu().numpy() for name, p in parameters.items()}
    for moments in optimizer.moments.values():
        for name, moment in moments.items():
            results[f"spec/{name}"] = np.array([spec_of(parameters[name]), spec_of(moment)])
    np.savez(sys.argv[1], **results)


if __name__ == "__main__":
    main()
