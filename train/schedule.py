"""The learning rate of a step, computed on the device: no step compiles anew for its rate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from train.config import OptimConfig


def learning_rate(step: Tensor, config: OptimConfig, num_steps: int) -> Tensor:
    """The rate of optimizer step `step` (1, 2, ..., num_steps; any shape and dtype), as float32 of
    that shape.

    Linear warm-up from 0, reaching the peak at step warmup_steps (0: at the peak from the start).
    Then, down to min_lr_ratio of the peak at num_steps:

    - constant: it stays at the peak;
    - cosine: half a cosine (Loshchilov and Hutter, https://arxiv.org/abs/1608.03983);
    - linear: a straight line;
    - wsd: the peak until the last decay_share of the steps, then a straight line. A run may so be
      prolonged from any checkpoint before the fall (Hu et al., https://arxiv.org/abs/2404.06395;
      Haegele et al., https://arxiv.org/abs/2405.18392, compare forms of the fall).
    """
    step = step.to(torch.float32)
    rate = config.learning_rate * (step / max(1, config.warmup_steps)).clamp(max=1.0)
    if config.schedule == "constant":
        return rate
    start = config.warmup_steps
    if config.schedule == "wsd":
        start = max(start, num_steps - config.decay_share * num_steps)
    progress = ((step - start) / max(1, num_steps - start)).clamp(0.0, 1.0)
    if config.schedule == "cosine":
        remaining = 0.5 * (1 + torch.cos(math.pi * progress))
    else:
        remaining = 1 - progress
    return rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)
