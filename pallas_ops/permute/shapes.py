"""Named shapes of permute: those of the routing it follows."""

from pallas_ops.routing.shapes import CPU_BRANCH, GEMMA4_26B, TINY, DispatchShape

__all__ = ["CPU_BRANCH", "GEMMA4_26B", "TINY", "DispatchShape"]
