"""Rotary position embedding on the two halves of a head, with half-width tables.

Su et al., "RoFormer", 2021. Coordinates (j, j + H/2) turn by position * frequency_j; global layers
turn only the first frequencies ("proportional": the exponent's denominator stays the whole head
size H, and the pairs stay (j, j + H/2)). Tables come from the config in every forward and are held
nowhere, so there is no buffer for a meta-device build to lose.
"""

import torch
from torch import Tensor

from torch_gemma4.config import RopeSpec
from torch_gemma4.execution import wide


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> list[float]:
    """The H/2 angles a step of one position turns each pair by: theta^(-2j/H) / factor for the
    first int(partial_rotary_factor * H // 2) pairs, zero (no rotation) for the rest."""
    num_turning = int(spec.partial_rotary_factor * head_dim // 2)
    turning = [spec.theta ** (-2 * j / head_dim) / spec.factor for j in range(num_turning)]
    return turning + [0.0] * (head_dim // 2 - num_turning)


def rope_tables(
    spec: RopeSpec, head_dim: int, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(cos, sin) [..., S, 1, H/2] of `positions` [..., S]; the 1 stands for the heads.

    Computed and kept in at least float32 for activations of `dtype`: an angle of 10^4 rad has no
    use for bfloat16.
    """
    frequencies = torch.tensor(
        inverse_frequencies(spec, head_dim), dtype=wide(dtype), device=positions.device
    )
    angles = positions.to(frequencies.dtype)[..., None, None] * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [B, S, heads, H] by tables [S, 1, H/2] or [B, S, 1, H/2]; the tables' dtype inside,
    rounded once to x's.

    The direct form of x * cos + rotate_half(x) * sin: the same products and sums (bit for bit in
    float32) without building the rotated copy and full-width tables.
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
