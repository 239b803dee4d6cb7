"""Trains a micro model on a virtual mesh from the newest checkpoint in a folder, in a process of
its own, and saves what test_checkpoint_mesh.py compares.

    python -m tests.train.checkpoint_worker OUT.npz FOLDER --fsdp 4 [--data 1] [--save 3] [--split]

Arrays: start, the step it went on from; losses of the steps after; state/<name> at the step to save
or, without one, as restored; compilations after each step; num_copied, elements that a checkpoint
of the state would have.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

STEPS = 6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("folder")
    parser.add_argument("--fsdp", type=int)
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--save", type=int)
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--until", type=int, default=STEPS)
    arguments = parser.parse_args()

    from tests.train.mesh_worker import batches
    from torch_gemma4 import presets
    from train.config import DataConfig, MeshConfig, OptimConfig, PrecisionConfig, RunConfig
    from train.launch import prepare_environment

    config = RunConfig(
        name="checkpoint_worker",
        steps=STEPS,
        attention="einsum",
        mesh=MeshConfig(fsdp=arguments.fsdp, data=arguments.data),
        precision=PrecisionConfig(compute="float32"),
        data=DataConfig(sequence_length=32, batch_size=8),
        optim=OptimConfig(learning_rate=1e-2, warmup_steps=2, skip_outliers=50, outlier_window=4),
        model=replace(
            presets.micro(),
            vocab_size=256,
            load_balance_loss_weight=0.01,
            split_expert_weights=arguments.split,
        ),
    )
    prepare_environment(config.mesh)
    import torch_xla.debug.metrics as counters

    from train.checkpoint.checkpointer import Checkpointer
    from train.checkpoint.tensors import host_copy
    from train.hosts import Hosts
    from train.loop import _build
    from train.mesh import DeviceMesh
    from train.step import make_train_step

    class Data:
        def __init__(self):
            self.stream, self.next = list(batches(config)), 0

        def __next__(self):
            self.next += 1
            return self.stream[self.next - 1]

        def state_dict(self):
            return {"next": self.next}

        def load_state_dict(self, state):
            self.next = state["next"]

    mesh, data = DeviceMesh(config.mesh), Data()
    model, optimizer = _build(config, mesh)
    tensors = dict(model.named_parameters()) | optimizer.state()
    checkpointer = Checkpointer(
        config,
        arguments.folder,
        Hosts(),
        tensors,
        data,
        mesh.place_whole,
        mesh.annotate_parameter,
        print,
    )
    start = checkpointer.restore()

    def state():
        return {f"state/{name}": t.detach().cpu().numpy() for name, t in tensors.items()}

    results = state() if arguments.save is None else {}
    copies = host_copy(tensors).values()
    shards = [getattr(copy, "shards", None) for copy in copies]
    results["num_copied"] = sum(
        copy.numel() if parts is None else sum(part.unpadded_data.numel() for part in parts)
        for copy, parts in zip(copies, shards, strict=True)
    )
    step = make_train_step(model, optimizer, mesh)
    losses, compilations = [], []
    for number in range(start + 1, arguments.until + 1):
        losses.append(float(step(mesh.place_batch(next(data)))["loss"].cpu()))
        compilations.append(int(counters.counter_value("UncachedCompile")))
        if number == arguments.save:
            results |= state()
            checkpointer.save(number)
    checkpointer.wait()
    results |= {"losses": np.array(losses), "compilations": np.array(compilations)}
    np.savez(arguments.out, start=start, **results)


if __name__ == "__main__":
    main()
