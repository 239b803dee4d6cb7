"""Named shapes of attention, shared by tests, benchmarks and ahead-of-time compilation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    """q [B, S, N, H] against k and v [B, S, G, H]."""

    name: str
    """What it is, for reports."""
    batch: int
    """B."""
    length: int
    """S."""
    num_heads: int
    """N."""
    num_kv_heads: int
    """G."""
    head_dim: int
    """H."""
    window: int | None
    """Keys a query sees, itself included; None = all before it."""

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a visible key, over heads and batch, in one segment."""
        reach = self.length if self.window is None else min(self.window, self.length)
        pairs = self.length * reach - reach * (reach - 1) // 2
        return self.batch * self.num_heads * pairs

    @property
    def forward_flops(self) -> int:
        """Two products."""
        return 2 * 2 * self.num_pairs * self.head_dim

    @property
    def backward_flops(self) -> int:
        """Five products: scores again, dv, dweights, dk, dq."""
        return 5 * 2 * self.num_pairs * self.head_dim


# One chip of the reference workload.
GEMMA4_26B = (
    AttentionShape("local", 2, 16_384, 16, 8, 256, 1024),
    AttentionShape("global", 2, 16_384, 16, 2, 512, None),
)

# Odd lengths and head sizes, one head and many, windows of one key and beyond the sequence.
TINY = (
    AttentionShape("one token", 1, 1, 1, 1, 8, None),
    AttentionShape("causal", 2, 13, 4, 2, 8, None),
    AttentionShape("window of one", 1, 13, 2, 1, 10, 1),
    AttentionShape("window", 2, 37, 4, 2, 24, 5),
    AttentionShape("window beyond the sequence", 1, 37, 3, 3, 10, 64),
    AttentionShape("two blocks", 1, 200, 2, 1, 8, 40),
    AttentionShape("several blocks, window", 1, 600, 2, 2, 8, 260),
    AttentionShape("several blocks, causal", 1, 600, 8, 1, 8, None),
)
