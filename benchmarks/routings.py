"""Rows of each expert under a routing: what decides the steps of a grouped matmul."""

from __future__ import annotations

import numpy as np

from train.compile.static.routings import random_group_sizes

ROUTINGS = ("balanced", "worst", "aligned", "zipf", "one hot")


def group_sizes(routing: str, num_rows: int, num_groups: int) -> np.ndarray:
    """int32 [num_groups] rows of each group.

    "balanced": every row chooses a group uniformly at random, seed 0. "zipf": the same, but the
    i-th most popular group is chosen 1 / i times as often as the first; which it is, is random.
    "one hot": all rows are of the group in the middle. "worst": equal groups moved so that each
    boundary lies inside a row tile, whatever its size. "aligned": equal groups, whose boundaries
    are those of tiles where tiles divide a group: what no kernel can beat. Raises ValueError for
    another name.
    """
    draw = np.random.default_rng(0)
    if routing == "balanced":
        sizes = random_group_sizes(num_rows, num_groups)
    elif routing == "zipf":
        popularity = 1 / draw.permutation(np.arange(1, num_groups + 1))
        sizes = draw.multinomial(num_rows, popularity / popularity.sum())
    elif routing == "one hot":
        sizes = num_rows * (np.arange(num_groups) == num_groups // 2)
    elif routing in ("worst", "aligned"):
        bounds = np.arange(num_groups + 1) * num_rows // num_groups
        if routing == "worst":
            bounds[1:-1] = bounds[1:-1] // 16 * 16 + 1  # tiles are multiples of 16 rows
        sizes = np.diff(bounds)
    else:
        raise ValueError(f"routing={routing!r} is unknown; use one of {ROUTINGS}")
    return sizes.astype(np.int32)
