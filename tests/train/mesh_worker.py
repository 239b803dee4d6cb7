"""Trains a micro model on a virtual mesh in a process of its own, and saves what the mesh tests
compare.

    python -m tests.train.mesh_worker OUT.npz --fsdp 4 [--data 1] --layers scan --recompute full
    --steps 20

Arrays: losses [steps]; grad/<parameter> of the first step, before clipping; stored as text:
spec/<parameter>, the sharding of each gradient, and shape facts of the lowered step under hlo.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--data", type=int, default=1)
    parser.add_argument("--layers", default="scan")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--attention", default="einsum")
    parser.add_argument("--dispatch", default="gather")
    parser.add_argument("--hidden_size", type=int, default=32)
    parser.add_argument("--compute", default="float32")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--optim", default="adamw")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fsdpv2", action="store_true")
    arguments = parser.parse_args()

    from torch_gemma4 import presets
    from train.config import DataConfig, MeshConfig, OptimConfig, PrecisionConfig, RunConfig
    from train.launch import prepare_environment

    model_config = replace(
        presets.micro(),
        vocab_size=256,
        hidden_size=arguments.hidden_size,
        load_balance_loss_weight=0.01,
        router_z_loss_weight=0.001,
        z_loss_weight=1e-4,
        num_loss_tiles=2,
        split_expert_weights=arguments.split,
    )
    config = RunConfig(
        name="mesh_worker",
        steps=arguments.steps,
        seed=arguments.seed,
        layers=arguments.layers,
        recompute=arguments.recompute,
        attention=arguments.attention,
        dispatch=arguments.dispatch,
        accumulate=arguments.accumulate,
        mesh=MeshConfig(fsdp=arguments.fsdp, data=arguments.data),
        precision=PrecisionConfig(compute=arguments.compute),
        data=DataConfig(sequence_length=32, batch_size=arguments.batch_size),
        optim=OptimConfig(name=arguments.optim, learning_rate=1e-2, warmup_steps=2),
        model=model_config,
    )
    prepare_environment(config.mesh)
    results = _fsdpv2(config) if arguments.fsdpv2 else _train(config)
    np.savez(arguments.out, **results)


def batches(config):
    """The same packed batches in every process: three documents a row, some labels ignored."""
    draws = np.random.default_rng(0)
    shape = (config.data.batch_size, config.data.sequence_length)
    segments = np.repeat([[0] * 10 + [1] * 15 + [2] * 7], shape[0], axis=0).astype(np.int32)
    for _ in range(config.steps):
        # A line of text to learn: each row counts up from a random start.
        start = draws.integers(0, 200, (shape[0], 1))
        ids = ((start + np.arange(shape[1])) % 256).astype(np.int32)
        labels = ids.copy()
        labels[:, [0, 10, 25]] = -100
        labels[0, 20:] = -100
        yield {"input_ids": ids, "labels": labels, "segment_ids": segments}


def _train(config) -> dict[str, np.ndarray]:
    import torch_xla
    import torch_xla.debug.metrics as counters

    from train.build import build_model, build_optimizer
    from train.mesh import DeviceMesh
    from train.micro_batches import MicroBatches
    from train.step import make_train_step

    mesh = DeviceMesh(config.mesh)
    model = build_model(config, mesh)
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(config, mesh, model)
    stream = list(batches(config))

    # Gradients as the backward pass leaves them, before the step states where they belong.
    micro_batches = MicroBatches(model, mesh, config.accumulate)
    micro_batches.backward(mesh.place_batch(stream[0]))
    grads = {name: p.grad for name, p in parameters.items()}
    torch_xla.sync()
    spec_of = torch_xla._XLAC._get_xla_sharding_spec
    own = mesh.host_rows
    results = {"host_rows": np.array([*own.parts, own.num_parts])}
    for name, grad in grads.items():
        results[f"grad/{name}"] = grad.cpu().numpy()
        results[f"spec/{name}"] = np.array(f"{spec_of(grad)} | {spec_of(parameters[name])}")
        parameters[name].grad = None

    step = make_train_step(model, optimizer, mesh, config.accumulate)
    losses, compilations = [], []
    for batch in stream:
        metrics = step(mesh.place_batch(batch))
        if not losses:
            first = {f"metric/{name}": tensor.cpu().numpy() for name, tensor in metrics.items()}
        losses.append(metrics["loss"])
        compilations.append(int(counters.counter_value("UncachedCompile")))
    results |= first
    results["losses"] = np.array([float(loss.cpu()) for loss in losses])
    results["compilations"] = np.array(compilations)
    results["state_spec"] = np.array(
        [
            f"{spec_of(moment)} | {spec_of(parameters[name])}"
            for moments in optimizer.moments.values()
            for name, moment in moments.items()
        ]
    )
    return results


def _fsdpv2(config) -> dict[str, np.ndarray]:
    """The habit of other projects: torch_xla's wrapper class around the unscanned model."""
    import torch
    import torch_xla
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import (
        SpmdFullyShardedDataParallel,
    )

    from torch_gemma4.execution import Execution, Precision
    from torch_gemma4.init import init_parameters
    from torch_gemma4.model import Gemma4ForCausalLM
    from train.mesh import DeviceMesh
    from train.optim import clip_by_global_norm

    mesh = DeviceMesh(config.mesh)
    execution = Execution(
        precision=Precision(compute=torch.float32),
        sharding=mesh.op_sharding(config.model),
        constrain=mesh.constrain,
    )
    inner = Gemma4ForCausalLM(config.model, execution)
    init_parameters(inner, config.seed)
    for name, parameter in list(inner.named_parameters()):
        mesh.place_parameter(inner, name, parameter.detach())
    model = SpmdFullyShardedDataParallel(
        inner, mesh=mesh.xla_mesh, shard_output=lambda output, mesh: None
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.learning_rate)
    losses = []
    for batch in batches(config):
        placed = mesh.place_batch(batch)
        model(placed["input_ids"], segment_ids=placed["segment_ids"])
        loss = inner.loss(**placed).loss
        loss.backward()
        clip_by_global_norm([p.grad for p in model.parameters()], config.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(float(loss.cpu()))
    return {"losses": np.array(losses)}


if __name__ == "__main__":
    main()
