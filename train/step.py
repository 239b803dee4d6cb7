"""The compiled steps: what one call of training, evaluation and sampling is."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch_xla
from torch import Tensor

from train.micro_batches import Batch, MicroBatches
from train.optim import clip_by_global_norm, global_norm

if TYPE_CHECKING:
    from torch_gemma4.model import Gemma4ForCausalLM
    from train.mesh import MeshLayout
    from train.optim import AdamW


class TrainStep:
    """The training step: batch -> metrics as device tensors. One graph, compiled once."""

    trace_time_s = 0.0
    """What the last call spent in Python, recording the graph: a TPU runs the step before
    meanwhile."""

    def __init__(self, micro_batches: MicroBatches, optimizer: AdamW, mesh: MeshLayout) -> None:
        step = functools.partial(self._trace, micro_batches, optimizer, mesh)
        self._compiled = torch_xla.compile(step, full_graph=True, name="train_step")

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        return self._compiled(batch)

    def _trace(self, *arguments) -> dict[str, Tensor]:
        begun = time.perf_counter()
        metrics = train_step(*arguments)
        self.trace_time_s = time.perf_counter() - begun
        return metrics


def make_train_step(
    model: Gemma4ForCausalLM, optimizer: AdamW, mesh: MeshLayout, accumulate: int = 1
) -> TrainStep:
    """The compiled training step of a model and its optimizer, `accumulate` micro-batches each."""
    return TrainStep(MicroBatches(model, mesh, accumulate), optimizer, mesh)


def train_step(
    micro_batches: MicroBatches, optimizer: AdamW, mesh: MeshLayout, batch: Batch
) -> dict[str, Tensor]:
    """What training is: forward, backward, clip, update. Returns metrics as lazy tensors."""
    output = micro_batches.backward(batch)
    grads = list(optimizer.gradients().values())
    grad_norm = clip_by_global_norm(grads, optimizer.config.clip_norm)
    rate = optimizer.step(optimizer.guards.accept(grad_norm))
    pin_state(optimizer, mesh)
    with torch.no_grad():
        parameter_norm = global_norm(list(optimizer.parameters.values()))
    metrics = {"grad_norm": grad_norm, "parameter_norm": parameter_norm, "learning_rate": rate}
    metrics |= {name: part for name, part in output._asdict().items() if part is not None}
    metrics |= optimizer.guards.metrics()
    for parameter in optimizer.parameters.values():
        parameter.grad = None
    return metrics


def make_eval_step(
    model: Gemma4ForCausalLM, mesh: MeshLayout, accumulate: int = 1
) -> Callable[[Batch], dict[str, Tensor]]:
    """The held-out loss of a batch, `accumulate` micro-batches: cross entropy (mean over valid
    tokens) and how many those are."""
    micro_batches = MicroBatches(model, mesh, accumulate)

    def eval_step(batch: Batch) -> dict[str, Tensor]:
        output = micro_batches.losses(batch)
        return {"loss": output.cross_entropy, "num_valid": output.num_valid}

    return torch_xla.compile(eval_step, full_graph=True, name="eval_step")


def make_logits_step(
    model: Gemma4ForCausalLM, mesh: MeshLayout
) -> Callable[[Tensor, Tensor], Tensor]:
    """Logits [B, V] of the last position of input_ids [B, S] under segment_ids [B, S]."""

    def logits_step(input_ids: Tensor, segment_ids: Tensor) -> Tensor:
        with torch.no_grad():
            hidden, _ = model(input_ids, segment_ids=segment_ids)
            logits = model.logits(hidden[:, -1:])[:, 0]
        # Whole on every device: reading a split value back would run a gathering program of its
        # own.
        return mesh.annotate(logits, (None, None))

    return torch_xla.compile(logits_step, full_graph=True, name="logits_step")


def pin_state(optimizer: AdamW, mesh: MeshLayout) -> None:
    """New state lies as the old did; otherwise the next step would be another program."""
    for name, parameter in optimizer.parameters.items():
        mesh.annotate_parameter(name, parameter.data)
    for moments in optimizer.moments.values():
        for name, moment in moments.items():
            mesh.annotate_parameter(name, moment.data)
