"""A run in order: mesh, text, model, steps, held-out loss, a sample."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from train.launch import prepare_environment, refuse_without_chips

if TYPE_CHECKING:
    from pathlib import Path

    from train.config import RunConfig
    from train.data import TextData
    from train.mesh import DeviceMesh
    from train.metrics import MetricsWriter, Rates


def run(config: RunConfig) -> Path:
    """Trains as `config` says; returns the run's folder.

    Raises ValueError, before any step, for a mesh, data or folder that cannot be used, and later
    for data that cannot be; RuntimeError if a later step compiles anew.
    """
    if config.mesh.platform == "tpu":
        refuse_without_chips()
    prepare_environment(config.mesh)
    from train.data import TextData
    from train.mesh import DeviceMesh
    from train.metrics import MetricsWriter, create_run_directory
    from train.sharding import sharding_table

    data = TextData.load(config.data, vocab_size=config.model.vocab_size)
    # What cannot run leaves no folder behind.
    mesh = DeviceMesh(config.mesh)
    sharding_table(config.model, config.mesh)
    directory = create_run_directory(config)
    with MetricsWriter(directory, config.log, num_steps=config.steps) as metrics:
        metrics.print(f"metrics, TensorBoard scalars and config go to {directory}\n")
        _train(config, data, mesh, metrics)
    return directory


def _train(config: RunConfig, data: TextData, mesh: DeviceMesh, metrics: MetricsWriter) -> None:
    from train.build import build_model, decays, sharded_zeros
    from train.compile_watch import CompileWatch
    from train.evaluate import Evaluator
    from train.metrics import Rates, host_memory
    from train.metrics.device_memory import DeviceMemory
    from train.optim import AdamW
    from train.plan import print_plan
    from train.sample import Sampler
    from train.step import make_eval_step, make_logits_step, make_train_step

    model = build_model(config, mesh)
    optimizer = AdamW(
        dict(model.named_parameters()),
        config.optim,
        config.steps,
        decays=decays,
        zeros_like=functools.partial(sharded_zeros, mesh),
    )
    print_plan(config, mesh, metrics.console)

    train_step = make_train_step(model, optimizer, mesh)
    evaluator = Evaluator(config, data, mesh, make_eval_step(model))
    sampler = None
    if data.tokenizer is not None:
        sampler = Sampler(config, data.tokenizer, mesh, make_logits_step(model, mesh))
    rates, compilations = Rates.of(config), CompileWatch()
    device_memory = DeviceMemory(config.mesh.platform, metrics.print)
    metrics.print("compiling the training step: the first step takes longer than the others")
    pending: _Pending | None = None
    begun = time.perf_counter()
    with contextlib.closing(data.train_batches(mesh.host_rows)) as batches:
        for step in range(1, config.steps + 1):
            asked = time.perf_counter()
            batch = next(batches)
            data_wait = time.perf_counter() - asked
            with compilations.training_step(step, batch):
                output = train_step(mesh.place_batch(batch))
            # The row of a step is read while the next one runs: the host never holds a TPU up. A
            # CPU has run the step by now, and read a step late its time would count for the next
            # row.
            if pending is not None:
                begun = pending.log(metrics, begun)
            host = {
                "data_wait_s": data_wait,
                "trace_time_s": train_step.trace_time_s,
                "compilations": compilations.count,
                "compile_time_s": compilations.seconds,
                **host_memory(),
                **device_memory(),
            }
            pending = _Pending(step, output, host, rates)
            evaluates = evaluator.is_due(step)
            samples = sampler is not None and sampler.is_due(step)
            if evaluates or samples or step == config.steps or config.mesh.platform == "cpu":
                begun = pending.log(metrics, begun, evaluator if evaluates else dict)
                pending = None
            if samples:
                metrics.sample(step, sampler())
            if evaluates or samples:
                begun = time.perf_counter()
    if sampler is None and config.sample.length:
        metrics.print(f"no sample: data.source = {config.data.source!r} has no text")


@dataclass
class _Pending:
    """A dispatched step whose numbers are still on the device."""

    step: int
    output: dict[str, Tensor]
    host: dict[str, float]
    rates: Rates

    def log(
        self,
        metrics: MetricsWriter,
        begun: float,
        evaluate: Callable[[], dict[str, float]] = dict,
    ) -> float:
        """Waits for the step, then evaluates, and writes the row of both; returns when the step,
        which took from `begun` to then, was done."""
        from train.metrics import expert_load_metrics

        values = {name: tensor.cpu().float().numpy() for name, tensor in self.output.items()}
        now = time.perf_counter()
        row = {name: float(value) for name, value in values.items() if value.ndim == 0}
        if "expert_load" in values:
            row |= expert_load_metrics(values["expert_load"])
            row["router_entropy"] = float(values["router_entropy"].mean())
        row |= {"step_time_s": now - begun, **self.rates.metrics(now - begun), **self.host}
        metrics.log(self.step, **row, **evaluate())
        if "expert_load" in values:
            metrics.expert_load(self.step, values["expert_load"])
        return now
