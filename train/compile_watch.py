"""Compilations, counted; a training step that compiles again after warm-up is an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_WARM_UP_STEPS = 2
"""Steps that may compile the training step."""


class CompileWatch:
    """Only what is compiled inside `training_step` counts against it: evaluations, samples and
    checkpoints may compile what they like, whenever."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._shapes: dict[str, tuple[int, ...]] = {}

    @property
    def count(self) -> int:
        """Programs compiled by this process so far."""
        import torch_xla.debug.metrics as counters

        return int(counters.counter_value("UncachedCompile") or 0)

    @property
    def seconds(self) -> float:
        """Time this process has spent compiling so far."""
        import torch_xla.debug.metrics as counters

        data = counters.metric_data("CompileTime")
        return data[1] / 1e9 if data else 0.0

    @contextmanager
    def training_step(self, step: int, batch: dict[str, np.ndarray]) -> Iterator[None]:
        """Around the call of the training step on `batch`. Raises RuntimeError naming the arrays
        whose shape changed if it compiled anew; the first two steps of a process may."""
        shapes = {name: array.shape for name, array in batch.items()}
        self._shapes = self._shapes or shapes
        self._num_steps += 1
        before = self.count
        yield
        if self.count == before or self._num_steps <= _WARM_UP_STEPS:
            return
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
