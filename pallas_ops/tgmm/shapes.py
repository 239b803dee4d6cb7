"""Named shapes of tgmm, shared by tests, benchmarks and ahead-of-time compilation."""

from dataclasses import dataclass

from pallas_ops.gmm import shapes as gmm_shapes


@dataclass(frozen=True)
class TgmmShape:
    """lhs [R, K], rhs [R, N] to [G, K, N]."""

    name: str
    """What the product is, for reports."""
    num_rows: int
    """R, the contracted dimension, a group at a time."""
    size_k: int
    """K."""
    size_n: int
    """N."""
    num_groups: int
    """G."""

    @property
    def flops(self) -> int:
        """Multiplications and additions when every row has a group."""
        return 2 * self.num_rows * self.size_k * self.size_n


# The weight gradients of one chip of the reference workload, in the layout of the weights.
GEMMA4_26B = (
    TgmmShape("wi drhs", gmm_shapes.R26B, 1408, 2816, 128),
    TgmmShape("wo drhs", gmm_shapes.R26B, 704, 2816, 128),
)

TINY = tuple(
    TgmmShape(shape.name, shape.num_rows, shape.size_k, shape.size_n, shape.num_groups)
    for shape in gmm_shapes.TINY
    if not shape.transpose_rhs
)
