"""Loss on held-out text."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import SupportsFloat

from train.data import Batch

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

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits; a token of the byte tokenizer is one byte."""
        return self.loss / math.log(2)


def evaluate(loss_function: LossFunction, batches: Iterable[Batch]) -> Evaluation:
    """Every valid token weighs the same, in whichever batch it is."""
    results = [loss_function(batch) for batch in batches]
    counts = [int(float(count)) for _, count in results]
    total = sum(float(loss) * n for (loss, _), n in zip(results, counts, strict=True) if n > 0)
    assert sum(counts) > 0, "held-out batches have a valid token"
    return Evaluation(loss=total / sum(counts), num_tokens=sum(counts))
