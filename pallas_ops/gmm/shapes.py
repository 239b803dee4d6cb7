"""Named shapes of gmm, shared by tests, benchmarks and ahead-of-time compilation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GmmShape:
    """lhs [R, K] times rhs [G, K, N], or [G, N, K] with transpose_rhs."""

    name: str
    """What the product is, for reports."""
    num_rows: int
    """R."""
    size_k: int
    """K, the contracted dimension."""
    size_n: int
    """N."""
    num_groups: int
    """G."""
    transpose_rhs: bool
    """Whether the last dimension of rhs is contracted."""
    group_sizes: tuple[int, ...] | None = None
    """Rows of each group where the case depends on them; None = any split."""

    def __post_init__(self):
        sizes = self.group_sizes
        if sizes is not None and (len(sizes) != self.num_groups or sum(sizes) > self.num_rows):
            raise ValueError(
                f"group_sizes of {self.name} has {len(sizes)} groups of {sum(sizes)} rows; "
                f"expected {self.num_groups} groups of at most {self.num_rows} rows"
            )

    @property
    def rhs_shape(self) -> tuple[int, int, int]:
        """Of the matrices as they lie in memory."""
        sizes = (self.size_k, self.size_n)
        return (self.num_groups, *(sizes[::-1] if self.transpose_rhs else sizes))

    @property
    def flops(self) -> int:
        """Multiplications and additions when every row has a group."""
        return 2 * self.num_rows * self.size_k * self.size_n


# One chip of the reference workload: 2 x 16,384 tokens to 8 of 128 experts each. gate_up is stored
# [E, 2F, D] and down [E, F, D], so each backward product is the other orientation.
R26B = 2 * 16_384 * 8
GEMMA4_26B = (
    GmmShape("wi forward", R26B, 2816, 1408, 128, True),
    GmmShape("wi dlhs", R26B, 1408, 2816, 128, False),
    GmmShape("wo forward", R26B, 704, 2816, 128, False),
    GmmShape("wo dlhs", R26B, 2816, 704, 128, True),
)

# Below, beside and above one tile; a remainder in each of m, k, n alone and in all of them.
TINY = (
    GmmShape("one element", 1, 1, 1, 1, False),
    GmmShape("whole tiles", 256, 128, 128, 4, False),
    GmmShape("m remainder", 200, 128, 128, 4, True),
    GmmShape("k remainder", 128, 130, 128, 4, False),
    GmmShape("n remainder", 128, 128, 72, 4, True),
    GmmShape("every remainder", 77, 100, 43, 5, False),
    GmmShape("every remainder, transposed", 77, 100, 43, 5, True),
)

# Inputs that broke other libraries; the name says where.
KNOWN_ISSUES = (
    GmmShape("maxtext 1183: K no multiple of its tile", 32, 96, 96, 32, False),
    GmmShape(
        "tokamax 887: weight gradient of empty groups",
        32,
        64,
        43,
        18,
        False,
        (6, 5, 7, 4, 5, 5) + (0,) * 12,
    ),
    GmmShape("sglang-jax 1012: fewer rows than a tile", 7, 40, 24, 3, False, (3, 0, 4)),
    GmmShape("sglang-jax 1099: tile 384 and 1,024 rows", 1024, 16, 24, 384, False),
    GmmShape("pytorch 154557: rows past the groups", 32, 16, 24, 4, True, (8, 0, 9, 3)),
    GmmShape("cutlass 2674: offsets 0 8 16 16 32", 32, 16, 24, 4, False, (8, 8, 0, 16)),
    GmmShape("torchtitan 1166: all rows to one expert", 16, 24, 8, 4, True, (0, 0, 16, 0)),
)
