"""A run in order: mesh, text, model, steps, held-out loss, a sample."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from train.launch import prepare_environment, refuse_without_chips

if TYPE_CHECKING:
    from pathlib import Path

    from train.config import RunConfig
    from train.data import TextData
    from train.mesh import DeviceMesh
    from train.metrics import MetricsWriter

_WARM_UP_STEPS = 2
"""Steps that may compile the training step."""


def run(config: RunConfig) -> Path:
    """Trains as `config` says; returns the run's folder.

    Raises ValueError, before any step, for a mesh, text or folder that cannot be used; RuntimeError
    if a later step compiles anew.
    """
    if config.mesh.platform == "tpu":
        refuse_without_chips()
    prepare_environment(config.mesh)
    from train.data import TextData
    from train.mesh import DeviceMesh
    from train.metrics import MetricsWriter, create_run_directory
    from train.sharding import sharding_table

    data = TextData.load(config.data)
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
    from train.optim import AdamW
    from train.plan import print_plan
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

    metrics.print("compiling the training step: the first step takes longer than the others")
    train_step = make_train_step(model, optimizer, mesh)
    evaluator = _Evaluator(config, data, mesh, make_eval_step(model))
    compilations = CompileWatch()
    batches = data.train_batches()
    pending: _Pending | None = None
    begun = time.perf_counter()
    for step in range(1, config.steps + 1):
        asked = time.perf_counter()
        batch = next(batches)
        data_wait = time.perf_counter() - asked
        output = train_step(mesh.place_batch(batch))
        compilations.check_step(step, batch)
        # The row of a step is read while the next one runs: the host never holds a TPU up. A CPU
        # has run the step by now, and read a step late its time would count for the next row.
        if pending is not None:
            begun = pending.log(metrics, begun)
        pending = _Pending(step, output, data_wait, compilations.count, batch["input_ids"].size)
        is_due = evaluator.is_due(step)
        if is_due or step == config.steps or config.mesh.platform == "cpu":
            begun = pending.log(metrics, begun, evaluator if is_due else dict)
            pending = None
        if is_due:
            compilations.allow()
            begun = time.perf_counter()
    if config.sample.length:
        metrics.print(f"compiling, then drawing {config.sample.length} tokens")
        metrics.print(_sample(config, data, mesh, make_logits_step(model, mesh)))


@dataclass
class _Pending:
    """A dispatched step whose numbers are still on the device."""

    step: int
    output: dict[str, Tensor]
    data_wait_s: float
    num_compilations: int
    num_tokens: int

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
        row |= {
            "tokens_per_s": self.num_tokens / (now - begun),
            "step_time_s": now - begun,
            "data_wait_s": self.data_wait_s,
            "compilations": self.num_compilations,
        }
        metrics.log(self.step, **row, **evaluate())
        return now


class _Evaluator:
    """The held-out loss, on the same batches each time, as metrics of a row."""

    def __init__(self, config: RunConfig, data: TextData, mesh: DeviceMesh, eval_step) -> None:
        self._every, self._last = config.eval.every, config.steps
        self._mesh, self._eval_step = mesh, eval_step
        self._batches = data.eval_batches(config.eval.batches) if self._every else []

    def is_due(self, step: int) -> bool:
        return bool(self._every) and (step % self._every == 0 or step == self._last)

    def __call__(self) -> dict[str, float]:
        from train.evaluate import evaluate

        def loss_of(batch: dict[str, np.ndarray]) -> tuple[Tensor, Tensor]:
            output = self._eval_step(self._mesh.place_batch(batch))
            return output["loss"], output["num_valid"]

        result = evaluate(loss_of, self._batches)
        return {"eval_loss": result.loss, "eval_bits_per_byte": result.bits_per_byte}


class CompileWatch:
    """Counts compilations; a training step must cause none after warm-up."""

    def __init__(self) -> None:
        self._allowed: int | None = None
        self._shapes: dict[str, tuple[int, ...]] | None = None

    @property
    def count(self) -> int:
        """Programs compiled by this process so far."""
        import torch_xla.debug.metrics as counters

        return int(counters.counter_value("UncachedCompile") or 0)

    def allow(self) -> None:
        """Accepts what has been compiled so far, such as the evaluation step."""
        self._allowed = self.count

    def check_step(self, step: int, batch: dict[str, np.ndarray]) -> None:
        """Call after each training step with its batch. Raises RuntimeError naming the arrays whose
        shape changed if a step after warm-up compiled anew."""
        shapes = {name: array.shape for name, array in batch.items()}
        if step <= _WARM_UP_STEPS or self._allowed is None:
            self._shapes = self._shapes or shapes
            self.allow()
            return
        if self.count > self._allowed:
            changed = [
                f"{name} {self._shapes.get(name)} -> {shape}"
                for name, shape in shapes.items()
                if self._shapes.get(name) != shape
            ]
            cause = ", ".join(changed) or "none: a Python number became part of the program"
            raise RuntimeError(
                f"step {step} compiled the training step again ({self.count} compilations). "
                f"Changed shapes: {cause}"
            )


def _sample(config: RunConfig, data: TextData, mesh: DeviceMesh, logits_step) -> str:
    from train.sample import generate

    def logits_of(input_ids: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
        placed = mesh.place_batch({"input_ids": input_ids, "segment_ids": segment_ids})
        return logits_step(**placed).cpu().float().numpy()

    text = generate(
        logits_of,
        np.asarray(data.tokenizer.encode(config.sample.prompt)),
        length=config.sample.length,
        sequence_length=config.data.sequence_length,
        batch_size=mesh.num_row_shards,
        temperature=config.sample.temperature,
        seed=config.seed,
    )
    return "sample:\n" + data.tokenizer.decode(text[0])
