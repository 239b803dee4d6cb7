"""The loss and gradients of a batch, all at once or a part of it at a time: one device loop.

A batch cut into n micro-batches needs the activations of one. Each device keeps its own rows and
takes the same number of them in every micro-batch, so that nothing moves. Losses are divided by the
valid tokens of the whole batch, known before the first micro-batch runs, and so the n add up to the
joint batch's, gradients too, whatever part of the tokens each holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torch_gemma4.loss import IGNORE_INDEX, shift_labels
from torch_gemma4.model import LossOutput
from train.sharding import ROW_AXES
from train.xla_while import Computation, lower, placeholder, while_loop

if TYPE_CHECKING:
    from torch_gemma4.model import Gemma4ForCausalLM
    from train.mesh import MeshLayout

Batch = dict[str, Tensor]
"""int32 [B, S]: input_ids, labels, segment_ids, and positions if these restart."""

_AVERAGED = ("router_entropy",)
"""Parts of a LossOutput that are means over a micro-batch; all others add up."""


class MicroBatches:
    """A model's loss on batches [B, S] in `count` micro-batches.

    One is the model's own loss and backward pass. More are one XLA `while` with the fp32 sums of
    gradients as its carry, each lying as its parameter does: a micro-batch's gradients are
    reduce-scattered before they are added. The body is traced once.
    """

    def __init__(self, model: Gemma4ForCausalLM, mesh: MeshLayout, count: int = 1) -> None:
        self.model, self.mesh, self.count = model, mesh, count
        self._loss = _Loss(model)
        self._bodies: dict[tuple, tuple[Computation, tuple[str, ...]]] = {}

    def losses(self, batch: Batch) -> LossOutput:
        """Of the whole batch, without gradients."""
        with torch.no_grad():
            return self.model.loss(**batch) if self.count == 1 else self._loop(batch, [])

    def backward(self, batch: Batch) -> LossOutput:
        """The same, detached; the gradient of every parameter that requires one is in its
        `.grad`, which must be None before."""
        if self.count == 1:
            output = self.model.loss(**batch)
            output.loss.backward()
            return LossOutput(*(None if part is None else part.detach() for part in output))
        trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
        return self._loop(batch, trained)

    def _loop(self, batch: Batch, trained: list[str]) -> LossOutput:
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            targets = shift_labels(batch["labels"])
            num_items = (targets != IGNORE_INDEX).sum(dtype=torch.int32)
            rows = {name: self._split(array) for name, array in batch.items()}
            sums = [self._pinned(n, torch.zeros_like(parameters[n])) for n in trained]
        key = (tuple(trained), *((name, tuple(row.shape)) for name, row in rows.items()))
        if key not in self._bodies:
            self._bodies[key] = self._trace(parameters, trained, rows, num_items)
        body, names = self._bodies[key]
        constants = [*(p.detach() for p in parameters.values()), num_items]
        sums, columns = while_loop(
            body, sums, list(rows.values()), constants, self.count, reverse=False
        )
        for name, grad in zip(trained, sums, strict=True):
            parameters[name].grad = self._pinned(name, grad)
        parts = dict.fromkeys(LossOutput._fields)
        for name, column in zip(names, columns, strict=True):
            parts[name] = column.mean(0) if name in _AVERAGED else column.sum(0, dtype=column.dtype)
        return LossOutput(**parts)

    def _trace(
        self,
        parameters: dict[str, nn.Parameter],
        trained: list[str],
        rows: Batch,
        num_items: Tensor,
    ) -> tuple[Computation, tuple[str, ...]]:
        """The body of one micro-batch, and the parts of the loss that it puts out."""
        rows_in = {name: placeholder(row, row.shape[1:]) for name, row in rows.items()}
        params_in = {name: placeholder(p) for name, p in parameters.items()}
        sums_in = [placeholder(parameters[name]) for name in trained]
        num_items_in = placeholder(num_items)
        wanted = [params_in[name].requires_grad_() for name in trained]
        values = {f"model.{name}": value for name, value in params_in.items()}
        options = rows_in | {"num_items": num_items_in, "num_micro_batches": self.count}
        with torch.set_grad_enabled(bool(trained)):
            output = functional_call(self._loss, values, (), options, strict=True)
        new_sums = []
        if trained:
            grads = torch.autograd.grad(output.loss, wanted)
            for name, total, grad in zip(trained, sums_in, grads, strict=True):
                new_sums.append(self._pinned(name, total + self._pinned(name, grad)))
        parts = {n: part.detach() for n, part in output._asdict().items() if part is not None}
        groups = {
            "carry": sums_in,
            "row": list(rows_in.values()),
            "constant": [*params_in.values(), num_items_in],
        }
        body = lower("micro_batch", [*new_sums, *parts.values()], groups, len(new_sums))
        return body, tuple(parts)

    def _pinned(self, name: str, tensor: Tensor) -> Tensor:
        return self.mesh.annotate_parameter(name, tensor)

    def _split(self, array: Tensor) -> Tensor:
        """[B, S] -> [count, B / count, S], every device's rows staying on it."""
        pieces = array.unflatten(0, (self.mesh.num_row_shards, self.count, -1)).transpose(0, 1)
        return self.mesh.annotate(pieces.flatten(1, 2), (None, ROW_AXES, None))


class _Loss(nn.Module):
    """`model.loss` as a forward, which is what functional_call calls."""

    def __init__(self, model: Gemma4ForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, **arguments) -> LossOutput:
        return self.model.loss(**arguments)
