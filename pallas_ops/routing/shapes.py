"""Named shapes of the dispatch: routing_plan, permute and combine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DispatchShape:
    """T tokens of width D, each to K of E experts."""

    name: str
    """What is dispatched, for reports."""
    num_tokens: int
    """T."""
    top_k: int
    """K."""
    num_experts: int
    """E."""
    width: int
    """D."""
    skew: float = 0.0
    """Exponent of a Zipf law over experts; 0 = all equally likely."""


# One chip of the reference workload, and the branch that benchmarks/cpu_moe.py times.
GEMMA4_26B = (DispatchShape("26B per chip", 2 * 16_384, 8, 128, 2816),)
CPU_BRANCH = DispatchShape("26B branch, 512 tokens", 512, 8, 128, 2816)

# More experts than rows of a block, fewer, skewed, and token counts around a block of 256.
TINY = (
    DispatchShape("one token", 1, 1, 1, 1),
    DispatchShape("one block", 256, 8, 16, 32),
    DispatchShape("as many experts as 26B", 256, 8, 128, 16),
    DispatchShape("no whole block", 100, 3, 9, 24),
    DispatchShape("two blocks", 512, 6, 12, 16, 0.3),
    DispatchShape("three blocks, skewed", 768, 2, 32, 16, 1.0),
)
