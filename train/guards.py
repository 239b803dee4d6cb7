"""Whether an update is taken, decided on the device.

One bad batch, or one flipped bit, must not end up in the weights. The decision is part of the
compiled step: nothing is read back for it, and the host learns of it with the step's metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from train.exit_codes import Diverged

if TYPE_CHECKING:
    from train.config import OptimConfig


class Guards:
    """Refuses a gradient that is not finite, and one whose norm stands out from the last ones.

    Outliers: more than `skip_outliers` standard deviations above the mean of the last
    `outlier_window` finite norms, refused ones among them, so that a lasting change of level is
    accepted in the end. Until there are that many, only non-finite gradients are refused.
    """

    def __init__(self, config: OptimConfig, device: torch.device) -> None:
        self.config = config
        self.num_skipped, self.num_in_a_row, self.num_norms = (
            torch.zeros((), dtype=torch.int32, device=device) for _ in range(3)
        )
        self.norms = torch.zeros(config.outlier_window, dtype=torch.float32, device=device)

    @torch.no_grad()
    def accept(self, norm: Tensor) -> Tensor:
        """Whether to take the update whose gradients have `norm`, a float32 scalar; a bool scalar.
        Takes note of it."""
        is_finite = torch.isfinite(norm)
        is_taken = is_finite
        if self.config.skip_outliers:
            mean = self.norms.mean()
            deviation = (self.norms - mean).square().mean().sqrt()
            stands_out = norm > mean + self.config.skip_outliers * deviation
            is_taken = is_finite & ~(stands_out & (self.num_norms >= len(self.norms)))
            index = torch.arange(len(self.norms), dtype=torch.int32, device=norm.device)
            is_next = (index == self.num_norms % len(self.norms)) & is_finite
            self.norms.copy_(torch.where(is_next, norm, self.norms))
            self.num_norms += is_finite.to(torch.int32)
        self.num_skipped += (~is_taken).to(torch.int32)
        self.num_in_a_row.copy_(torch.where(is_taken, 0, self.num_in_a_row + 1))
        return is_taken

    def state(self) -> dict[str, Tensor]:
        """The live tensors, for a checkpoint."""
        names = ("num_skipped", "num_in_a_row", "num_norms", "norms")
        return {f"guards/{name}": getattr(self, name) for name in names}

    def metrics(self) -> dict[str, Tensor]:
        """Counts after the last `accept`, as copies."""
        return {
            "skipped_updates": self.num_skipped * 1,
            "skipped_in_a_row": self.num_in_a_row * 1,
        }


def refuse_to_go_on(step: int, row: dict[str, float], config: OptimConfig) -> None:
    """Raises Diverged if the metrics of `step` show too many skipped updates in a row."""
    if row["skipped_in_a_row"] >= config.abort_after:
        raise Diverged(
            f"diverged: the last {row['skipped_in_a_row']:.0f} updates, up to step {step}, were "
            f"skipped for their gradient (norm {row['grad_norm']:g}, loss {row['loss']:g}; "
            "--optim.abort_after). The weights are those before them. Look at "
            "the last rows of metrics.jsonl; a lower --optim.learning_rate, or another --data.seed "
            "to pass the place, are the usual cures"
        )
