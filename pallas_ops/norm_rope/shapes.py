"""Named shapes of norm_rope, shared by tests, benchmarks and ahead-of-time compilation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NormRopeShape:
    """x [B, S, N, H]."""

    name: str
    """What it is, for reports."""
    batch: int
    """B."""
    length: int
    """S."""
    num_heads: int
    """N."""
    head_dim: int
    """H."""
    scaled: bool = True
    """With a weight [H]."""
    turned: bool = True
    """With rotary tables."""


# One chip of the reference workload.
GEMMA4_26B = (
    NormRopeShape("local q", 2, 16_384, 16, 256),
    NormRopeShape("local k", 2, 16_384, 8, 256),
    NormRopeShape("local v", 2, 16_384, 8, 256, scaled=False, turned=False),
    NormRopeShape("global q", 2, 16_384, 16, 512),
    NormRopeShape("global k", 2, 16_384, 2, 512),
    NormRopeShape("global v", 2, 16_384, 2, 512, scaled=False, turned=False),
)

# One row, odd lengths, several blocks with a ragged last one, small heads and whole registers.
TINY = (
    NormRopeShape("one row", 1, 1, 1, 2),
    NormRopeShape("odd", 2, 13, 3, 10),
    NormRopeShape("plain norm", 2, 13, 2, 6, scaled=False, turned=False),
    NormRopeShape("scale alone", 1, 9, 2, 8, turned=False),
    NormRopeShape("rotation alone", 1, 9, 2, 8, scaled=False),
    NormRopeShape("whole registers", 2, 40, 2, 256),
    NormRopeShape("ragged block", 1, 1100, 1, 256),
)
