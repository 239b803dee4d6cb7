"""What a step's time amounts to, and what memory the process holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pallas_ops.chips import V6E
from torch_gemma4.accounting import training_flops

if TYPE_CHECKING:
    from train.config import RunConfig


@dataclass(frozen=True)
class Rates:
    """From seconds a step to rates. FLOPs are counted as `torch_gemma4.accounting` says: causal and
    windowed attention, no recomputation."""

    tokens_per_step: int
    """Of the global batch, padding included."""
    flops_per_chip: int
    """Of a training step, on one device."""
    peak_flops: float | None
    """A device's bf16 peak per second; None where there is none to compare with (CPU)."""

    @classmethod
    def of(cls, config: RunConfig) -> Rates:
        """Those of a run."""
        data, num_devices = config.data, config.mesh.num_devices
        flops = training_flops(
            config.model,
            sequence_length=data.sequence_length,
            sequences_per_chip=data.batch_size // num_devices,
        )
        on_tpu = config.mesh.platform == "tpu"
        return cls(
            data.batch_size * data.sequence_length,
            flops.training,
            V6E.peak_bf16_flops if on_tpu else None,
        )

    def metrics(self, step_time_s: float) -> dict[str, float]:
        """tokens_per_s of the whole mesh, tflops_per_chip, and mfu (0 to 1) where there is a
        peak."""
        flops_per_s = self.flops_per_chip / step_time_s
        rates = {
            "tokens_per_s": self.tokens_per_step / step_time_s,
            "tflops_per_chip": flops_per_s / 1e12,
        }
        return rates if self.peak_flops is None else rates | {"mfu": flops_per_s / self.peak_flops}


def host_memory(status: Path = Path("/proc/self/status")) -> dict[str, float]:
    """host_memory_bytes: what this process holds in memory now. Nothing where the kernel does not
    say (it is Linux's own file)."""
    if not status.exists():
        return {}
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return {"host_memory_bytes": 1024.0 * int(fields["VmRSS"].split()[0])}
