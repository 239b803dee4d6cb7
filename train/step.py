"""The compiled steps: what one call of training, evaluation and sampling is."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch_xla
from torch import Tensor

from train.optim import clip_by_global_norm, global_norm

if TYPE_CHECKING:
    from torch_gemma4.model import Gemma4ForCausalLM
    from train.mesh import MeshLayout
    from train.optim import AdamW

Batch = dict[str, Tensor]
"""int32 [B, S]: input_ids, labels, segment_ids, and positions if these restart."""


class TrainStep:
    """The training step: batch -> metrics as device tensors. One graph, compiled once."""

    trace_time_s = 0.0
    """What the last call spent in Python, recording the graph: a TPU runs the step before
    meanwhile."""

    def __init__(self, model: Gemma4ForCausalLM, optimizer: AdamW, mesh: MeshLayout) -> None:
        step = functools.partial(self._trace, model, optimizer, mesh)
        self._compiled = torch_xla.compile(step, full_graph=True, name="train_step")

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        return self._compiled(batch)

    def _trace(self, *arguments) -> dict[str, Tensor]:
        begun = time.perf_counter()
        metrics = train_step(*arguments)
        self.trace_time_s = time.perf_counter() - begun
        return metrics


def make_train_step(model: Gemma4ForCausalLM, optimizer: AdamW, mesh: MeshLayout) -> TrainStep:
    """The compiled training step of a model and its optimizer."""
    return TrainStep(model, optimizer, mesh)


def train_step(
    model: Gemma4ForCausalLM, optimizer: AdamW, mesh: MeshLayout, batch: Batch
) -> dict[str, Tensor]:
    """What training is: forward, backward, clip, update. Returns metrics as lazy tensors."""
    output = model.loss(**batch)
    output.loss.backward()
    grads = list(optimizer.gradients().values())
    grad_norm = clip_by_global_norm(grads, optimizer.config.clip_norm)
    rate = optimizer.step(optimizer.guards.accept(grad_norm))
    _pin_state(optimizer, mesh)
    with torch.no_grad():
        parameter_norm = global_norm(list(optimizer.parameters.values()))
    metrics = {"grad_norm": grad_norm, "parameter_norm": parameter_norm, "learning_rate": rate}
    metrics |= _reported(output)
    metrics |= optimizer.guards.metrics()
    for parameter in optimizer.parameters.values():
        parameter.grad = None
    return metrics


def make_eval_step(model: Gemma4ForCausalLM) -> Callable[[Batch], dict[str, Tensor]]:
    """The held-out loss of a batch: cross entropy (mean over valid tokens) and how many those
    are."""

    def eval_step(batch: Batch) -> dict[str, Tensor]:
        with torch.no_grad():
            output = model.loss(**batch)
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


def _reported(output) -> dict[str, Tensor]:
    names = ("loss", "cross_entropy", "num_valid", "z_loss", "load_balance_loss")
    names += ("router_z_loss", "expert_load", "router_entropy")
    values = {name: getattr(output, name) for name in names}
    return {name: value.detach() for name, value in values.items() if value is not None}


def _pin_state(optimizer: AdamW, mesh: MeshLayout) -> None:
    """New state lies as the old did; otherwise the next step would be another program."""
    for name, parameter in optimizer.parameters.items():
        for tensor in (parameter, optimizer.exp_avg[name], optimizer.exp_avg_sq[name]):
            mesh.annotate_parameter(name, tensor.data)
