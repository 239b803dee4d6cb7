"""A run in order: mesh, text, model, checkpoint, steps, held-out loss, a sample."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from torch import Tensor

from train.exit_codes import DataFailure, Preempted, StorageFailure
from train.launch import prepare_environment, refuse_without_chips

if TYPE_CHECKING:
    from torch_gemma4.model import Gemma4ForCausalLM
    from train.checkpoint.checkpointer import DataPosition
    from train.config import RunConfig
    from train.data import Batch, TextData
    from train.hosts import Hosts
    from train.mesh import DeviceMesh
    from train.metrics import MetricsWriter
    from train.optim import AdamW
    from train.preemption import PreemptionNotice

_WARM_UP_STEPS = 2
"""Steps that may compile the training step."""


def run(config: RunConfig) -> Path:
    """Trains as `config` says, from the run's newest checkpoint if it has one; returns the run's
    folder.

    Raises ValueError, before any step, for a mesh, text, folder or checkpoint that cannot be used;
    RunEnded (see train.exit_codes) for a run that ends early; RuntimeError if a later step compiles
    anew.
    """
    if config.mesh.platform == "tpu":
        refuse_without_chips()
    prepare_environment(config.mesh)
    from train.run_folder import finished_line, run_folder

    if line := finished_line(config):
        print(line)
        return Path(config.log.dir, config.name)

    from train.data import TextData
    from train.hosts import connect_hosts
    from train.mesh import DeviceMesh
    from train.out_of_memory import out_of_memory_explained
    from train.sharding import sharding_table

    data = TextData.load(config.data)
    # What cannot run leaves no folder behind.
    mesh = DeviceMesh(config.mesh)
    sharding_table(config.model, config.mesh)
    hosts = connect_hosts()
    with run_folder(config, hosts) as directory, out_of_memory_explained(config):
        _train(config, data, mesh, hosts, directory)
    return directory


def _train(
    config: RunConfig, data: TextData, mesh: DeviceMesh, hosts: Hosts, directory: Path
) -> None:
    from train.guards import refuse_to_go_on
    from train.metrics import MetricsWriter
    from train.plan import print_plan
    from train.preemption import PreemptionNotice
    from train.step import make_eval_step, make_logits_step, make_train_step
    from train.watchdog import Watchdog

    console = Console()
    model, optimizer = _build(config, mesh)
    batches = data.train_batches()
    saving = _Saving(config, mesh, hosts, directory, model, optimizer, batches, console)
    done = saving.restore()
    with (
        MetricsWriter(
            directory, config.log, num_steps=config.steps, done=done, console=console
        ) as metrics,
        Watchdog(config.hang_minutes) as watchdog,
        PreemptionNotice() as notice,
    ):
        metrics.print(f"metrics, TensorBoard scalars and config go to {directory}\n")
        print_plan(config, mesh, console)
        metrics.print("compiling the training step: the first step takes longer than the others")
        train_step = make_train_step(model, optimizer, mesh)
        evaluator = _Evaluator(config, data, mesh, make_eval_step(model))
        compilations = CompileWatch()
        pending: _Pending | None = None
        begun = time.perf_counter()
        for step in range(done + 1, config.steps + 1):
            asked = time.perf_counter()
            batch = _next(batches, step)
            data_wait = time.perf_counter() - asked
            output = train_step(mesh.place_batch(batch))
            compilations.check_step(step, batch)
            # The row of a step is read while the next one runs: the host never holds a TPU up. A
            # CPU has run the step by now, and read a step late its time would count for the next.
            if pending is not None:
                begun = pending.log(metrics, begun)
                refuse_to_go_on(pending.step, pending.row, config.optim)
            pending = _Pending(step, output, data_wait, compilations.count, batch["input_ids"].size)
            is_due = evaluator.is_due(step)
            to_save, is_preempted = saving.decide(step, notice)
            if is_due or to_save or step == config.steps or config.mesh.platform == "cpu":
                begun = pending.log(metrics, begun, evaluator if is_due else dict)
                refuse_to_go_on(step, pending.row, config.optim)
                pending = None
            if to_save:
                saving.save(step, is_preempted)
            if is_due or to_save:
                compilations.allow()
                begun = time.perf_counter()
            watchdog.beat(f"step {step}")
        saving.finish()
        if config.sample.length:
            metrics.print(f"compiling, then drawing {config.sample.length} tokens")
            metrics.print(_sample(config, data, mesh, make_logits_step(model, mesh)))


def _build(config: RunConfig, mesh: DeviceMesh) -> tuple[Gemma4ForCausalLM, AdamW]:
    from train.build import build_model, decays, sharded_zeros
    from train.optim import AdamW

    model = build_model(config, mesh)
    optimizer = AdamW(
        dict(model.named_parameters()),
        config.optim,
        config.steps,
        decays=decays,
        zeros_like=functools.partial(sharded_zeros, mesh),
    )
    return model, optimizer


def _next(batches: Iterator[Batch], step: int) -> Batch:
    try:
        return next(batches)
    except Exception as error:
        # What the data says of itself is enough; what our code did not foresee needs its place.
        is_foreseen = isinstance(error, (ValueError, OSError))
        raise DataFailure(
            f"data error: the batch of step {step} could not be made "
            f"({type(error).__name__}: {error}). Mend the data, then run the same command again: "
            "it goes on from the last checkpoint",
            details="" if is_foreseen else "".join(traceback.format_exception(error)).rstrip(),
        ) from error


class _Saving:
    """The checkpoints of a run, or none."""

    def __init__(
        self,
        config: RunConfig,
        mesh: DeviceMesh,
        hosts: Hosts,
        directory: Path,
        model: Gemma4ForCausalLM,
        optimizer: AdamW,
        batches: DataPosition,
        console: Console,
    ) -> None:
        from train.checkpoint import Checkpointer
        from train.run_folder import checkpoint_address

        self._hosts, self._checkpointer = hosts, None
        if config.checkpoint.is_on:
            weights = {f"model/{name}": p for name, p in model.named_parameters()}
            self._checkpointer = Checkpointer(
                config,
                checkpoint_address(config, hosts.gather(directory.name)[0]),
                hosts,
                weights | optimizer.state(),
                batches,
                mesh.place_whole,
                functools.partial(console.print, soft_wrap=True, highlight=False, markup=False),
            )

    def restore(self) -> int:
        """Steps done before."""
        return self._checkpointer.restore() if self._checkpointer else 0

    def decide(self, step: int, notice: PreemptionNotice) -> tuple[bool, bool]:
        """(whether to save after `step`, whether it is the last for now), the same on all hosts.
        Raises StorageFailure where a checkpoint could not be written."""
        due = self._checkpointer is not None and self._checkpointer.is_due(step)
        failed = self._checkpointer is not None and self._checkpointer.has_failed
        due, is_preempted, failed = self._hosts.any(due, notice.is_given, failed)
        if failed:
            self._checkpointer.wait()
            raise StorageFailure("another host could not write its part of the last checkpoint")
        return due or is_preempted, is_preempted

    def save(self, step: int, is_preempted: bool) -> None:
        """Raises Preempted, when the checkpoint is whole, if this is the last one for now."""
        if self._checkpointer:
            self._checkpointer.save(step)
        if is_preempted:
            self.finish()
            kept = "is saved: the same command goes on from there"
            lost = "is not saved: --checkpoint.every_minutes and every_steps are both 0"
            raise Preempted(f"preempted: step {step} {kept if self._checkpointer else lost}")

    def finish(self) -> None:
        """Waits for what is being written."""
        if self._checkpointer:
            self._checkpointer.wait()


@dataclass
class _Pending:
    """A dispatched step whose numbers are still on the device."""

    step: int
    output: dict[str, Tensor]
    data_wait_s: float
    num_compilations: int
    num_tokens: int
    row: dict[str, float] = field(default_factory=dict)
    """What `log` wrote."""

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
        self.row = row | evaluate()
        metrics.log(self.step, **self.row)
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
        self._allowed, self._num_steps = 0, 0
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
        self._num_steps += 1
        if self._num_steps <= _WARM_UP_STEPS:
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
