"""A run in order: mesh, text, model, checkpoint, steps, held-out loss, a sample."""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

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
    from train.metrics import MetricsWriter, Rates
    from train.optim import AdamW
    from train.preemption import PreemptionNotice


def run(config: RunConfig) -> Path:
    """Trains as `config` says, from the run's newest checkpoint if it has one; returns the run's
    folder.

    Raises ValueError, before any step, for a mesh, data, folder or checkpoint that cannot be used;
    RunEnded (see train.exit_codes) for a run that ends early; RuntimeError if a later step compiles
    anew.
    """
    if config.mesh.platform == "tpu":
        refuse_without_chips()
    prepare_environment(config.mesh)
    from train.run_folder import begins, finished_line, run_folder

    if line := finished_line(config):
        print(line)
        return Path(config.log.dir, config.name)

    from train.data import TextData
    from train.hosts import connect_hosts
    from train.init_from import refuse_unfit_weights
    from train.mesh import DeviceMesh
    from train.out_of_memory import out_of_memory_explained
    from train.sharding import sharding_table

    if config.init_from and begins(config):
        refuse_unfit_weights(config)
    data = TextData.load(config.data, vocab_size=config.model.vocab_size)
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
    from train.compile_watch import CompileWatch
    from train.evaluate import Evaluator
    from train.guards import refuse_to_go_on
    from train.metrics import MetricsWriter, Rates, host_memory
    from train.metrics.device_memory import DeviceMemory
    from train.plan import print_plan
    from train.preemption import PreemptionNotice
    from train.sample import Sampler
    from train.step import make_eval_step, make_logits_step, make_train_step
    from train.step_trace import StepTrace
    from train.watchdog import Watchdog

    console = Console()
    model, optimizer = _build(config, mesh)
    # The numbers are those of the whole mesh: one host's pictures and W&B run are enough.
    log = config.log if hosts.is_first else replace(config.log, wandb="", heat_map_every=0)
    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(contextlib.closing(data.train_batches(mesh.host_rows)))
        saving = _Saving(config, mesh, hosts, directory, model, optimizer, batches, console)
        done = saving.restore()
        if config.init_from:
            _take_weights(config, model, mesh, hosts, done, console)
        metrics = stack.enter_context(
            MetricsWriter(directory, log, num_steps=config.steps, done=done, console=console)
        )
        trace = StepTrace(config.profile, directory / "profile", metrics.print)
        stack.enter_context(trace)
        watchdog = stack.enter_context(Watchdog(config.hang_minutes))
        notice = stack.enter_context(PreemptionNotice())
        metrics.print(f"metrics, TensorBoard scalars and config go to {directory}\n")
        print_plan(config, mesh, console)
        train_step = make_train_step(model, optimizer, mesh, config.accumulate)
        eval_step = make_eval_step(model, mesh, config.accumulate)
        evaluator = Evaluator(config, data, mesh, eval_step)
        sampler = None
        if data.tokenizer is not None:
            sampler = Sampler(config, data.tokenizer, mesh, make_logits_step(model, mesh))
        rates, compilations = Rates.of(config), CompileWatch()
        device_memory = DeviceMemory(config.mesh.platform, metrics.print)
        metrics.print("compiling the training step: the first step takes longer than the others")
        pending: _Pending | None = None
        begun = time.perf_counter()
        for step in range(done + 1, config.steps + 1):
            asked = time.perf_counter()
            with trace.around(step):
                batch = _next(batches, step)
                data_wait = time.perf_counter() - asked
                with compilations.training_step(step, batch):
                    output = train_step(mesh.place_batch(batch))
            # The row of a step is read while the next one runs: the host never holds a TPU up. A
            # CPU has run the step by now, and read a step late its time would count for the next.
            if pending is not None:
                begun = pending.log(metrics, begun)
                refuse_to_go_on(pending.step, pending.row, config.optim)
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
            to_save, is_preempted = saving.decide(step, notice)
            stops = evaluates or samples or to_save or step == config.steps or trace.is_edge(step)
            if stops or config.mesh.platform == "cpu":
                begun = pending.log(metrics, begun, evaluator if evaluates else dict)
                trace.done(step)
                refuse_to_go_on(step, pending.row, config.optim)
                pending = None
            if to_save:
                saving.save(step, is_preempted)
            if samples:
                metrics.sample(step, sampler())
            if stops:
                begun = time.perf_counter()
            watchdog.beat(f"step {step}")
        saving.finish()
        if sampler is None and config.sample.length:
            metrics.print(f"no sample: data.source = {config.data.source!r} has no text")


def _build(config: RunConfig, mesh: DeviceMesh) -> tuple[Gemma4ForCausalLM, AdamW]:
    from train.build import build_model, build_optimizer

    model = build_model(config, mesh)
    return model, build_optimizer(config, mesh, model)


def _take_weights(
    config: RunConfig,
    model: Gemma4ForCausalLM,
    mesh: DeviceMesh,
    hosts: Hosts,
    done: int,
    console: Console,
) -> None:
    from train.init_from import load_weights

    line = f"init_from is not read: the weights of {config.init_from} were where this run began"
    if not done:
        load_weights(config, model, hosts, mesh.place_whole)
        line = f"weights: {config.init_from}"
    console.print(line, soft_wrap=True, highlight=False, markup=False)


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
        from train.checkpoint.checkpointer import Checkpointer
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
                mesh.annotate_parameter,
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
    host: dict[str, float]
    rates: Rates
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
        row |= {"step_time_s": now - begun, **self.rates.metrics(now - begun), **self.host}
        self.row = row | evaluate()
        metrics.log(self.step, **self.row)
        if "expert_load" in values:
            metrics.expert_load(self.step, values["expert_load"])
        return now
