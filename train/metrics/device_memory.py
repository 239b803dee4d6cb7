"""How full the chips are. torch_xla answers this for no device under SPMD, so the chips' own
metrics service is asked, through Google's tpu-info (part of the tpu extra); no step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable


class DeviceMemory:
    """Call it for device_memory_bytes, of the fullest of this host's chips, and
    device_memory_limit_bytes; on a CPU it returns nothing. A service that fails is told of, once,
    and not asked again: a run does not end for it."""

    def __init__(self, platform: str, notify: Callable[[str], None]) -> None:
        """`notify` takes a line for a person."""
        self._works = platform == "tpu"
        self._notify = notify

    def __call__(self) -> dict[str, float]:
        if not self._works:
            return {}
        try:
            from tpu_info import device, metrics

            chip, _ = device.get_local_chips()
            fullest = max(metrics.get_chip_usage(chip), key=lambda usage: usage.memory_usage)
        except Exception as error:  # the package's, gRPC's and the service's have no common class
            self._works = False
            self._notify(
                f"no device memory among the metrics: {type(error).__name__}: {error} "
                "(pip install -e '.[tpu]'; the command tpu-info shows whether the service answers)"
            )
            return {}
        return {
            "device_memory_bytes": float(fullest.memory_usage),
            "device_memory_limit_bytes": float(fullest.total_memory),
        }
