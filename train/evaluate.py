"""Loss on held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsFloat

from train.data import Batch, EvalSet

if TYPE_CHECKING:
    from torch import Tensor

    from train.config import RunConfig
    from train.data import TextData
    from train.mesh import DeviceMesh

LossFunction = Callable[[Batch], tuple[SupportsFloat, SupportsFloat]]
"""Batch of numpy arrays -> (mean cross entropy over valid tokens in nats, number of those). Both
may still be on the device: they are read after the last batch was sent."""


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of held-out text."""

    loss: float
    """Mean cross entropy over all valid tokens, in nats."""
    num_tokens: int
    """How many those were."""
    bytes_per_token: float
    """UTF-8 bytes for each of them, on average over all held-out text; NaN where ids stand for no
    text."""

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits for each byte of text: comparable between tokenizers. What the model
        pays for the ends of documents is counted, and no bytes for them."""
        return self.loss / math.log(2) / self.bytes_per_token

    def metrics(self) -> dict[str, float]:
        """eval_loss, and eval_bits_per_byte where there are bytes."""
        metrics = {"eval_loss": self.loss, "eval_bits_per_byte": self.bits_per_byte}
        return {name: value for name, value in metrics.items() if not math.isnan(value)}


def evaluate(loss_function: LossFunction, data: EvalSet) -> Evaluation:
    """Every valid token weighs the same, in whichever batch it is."""
    results = [loss_function(batch) for batch in data.batches]
    counts = [int(float(count)) for _, count in results]
    total = sum(float(loss) * n for (loss, _), n in zip(results, counts, strict=True) if n > 0)
    assert sum(counts) > 0, "held-out batches have a valid token"
    return Evaluation(total / sum(counts), sum(counts), data.bytes_per_token)


class Evaluator:
    """The held-out loss on the same batches each time, as metrics of a row."""

    def __init__(
        self,
        config: RunConfig,
        data: TextData,
        mesh: DeviceMesh,
        eval_step: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    ) -> None:
        """Makes the batches. Raises ValueError if evaluation is asked for and nothing held out."""
        self._every, self._last = config.eval.every, config.steps
        self._mesh, self._eval_step = mesh, eval_step
        self._data = data.eval_set(config.eval.batches, mesh.host_rows) if self._every else None

    def is_due(self, step: int) -> bool:
        """Whether it is evaluated after `step`."""
        return bool(self._every) and (step % self._every == 0 or step == self._last)

    def __call__(self) -> dict[str, float]:
        assert self._data is not None, "asked when it was not due"
        return evaluate(self._loss_of, self._data).metrics()

    def _loss_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        output = self._eval_step(self._mesh.place_batch(batch))
        return output["loss"], output["num_valid"]
