"""The routing that kernels are modelled at: every token chooses experts at random, seed 0."""

from __future__ import annotations

import functools

import numpy as np


def random_group_sizes(num_rows: int, num_groups: int) -> np.ndarray:
    """int32 [G] sizes of num_rows rows that each choose a group uniformly at random."""
    draw = np.random.default_rng(0)
    return draw.multinomial(num_rows, [1 / num_groups] * num_groups).astype(np.int32)


@functools.cache
def random_windows(
    num_tokens: int, top_k: int, num_experts: int, block: int, skew: float = 0.0
) -> dict[str, np.ndarray]:
    """`bounds` and `fetch` of the window tables (pallas_ops/routing/windows.py) of tokens that each
    draw distinct experts, from a Zipf law of exponent `skew`: 0 = all equally likely."""
    import jax

    from pallas_ops.routing.windows import routing_windows

    noise = np.random.default_rng(0).gumbel(size=(num_tokens, num_experts))
    noise -= skew * np.log1p(np.arange(num_experts))
    ids = np.argpartition(noise, -top_k, axis=1)[:, -top_k:].astype(np.int32)

    def tables(ids):
        windows = routing_windows(ids, num_experts=num_experts, block=block)
        return {"bounds": windows.bounds, "fetch": windows.fetch}

    return {name: np.asarray(table) for name, table in jax.jit(tables)(ids).items()}
