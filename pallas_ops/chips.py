"""What a kernel needs to know of a chip, as data."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Chip:
    """One TPU core's limits and peak rates (v5p: its two cores as one). Sources: Google's
    documentation (cloud.google.com/tpu/docs/v6e, v5e, v5p); HBM as libtpu 0.0.21 states it when a
    program does not fit; VMEM of v6e as it accepts it, of the others as in JAX's Pallas."""

    name: str
    """The name of the topology family, e.g. "v6e"."""
    vmem_bytes: int
    """On-chip vector memory."""
    hbm_bytes: int
    """High-bandwidth memory a program can use."""
    peak_bf16_flops: float
    """Multiply-adds counted as two, per second."""
    hbm_bytes_per_s: float
    """Peak memory bandwidth."""
    mxu_width: int
    """Rows and columns of one matrix unit."""
    num_lanes: int
    """Minor dimension of a vector register: tiles' last dimension is a multiple of it or a whole
    dimension."""
    row_group: int
    """Rows that bf16 memory is addressed by: row tiles are multiples of it."""


V6E = Chip(
    name="v6e",
    vmem_bytes=128 * MIB,
    hbm_bytes=int(31.25 * 1024 * MIB),
    peak_bf16_flops=918e12,
    hbm_bytes_per_s=1638e9,
    mxu_width=256,
    num_lanes=128,
    row_group=16,
)

V5P = Chip(
    name="v5p",
    vmem_bytes=64 * MIB,
    hbm_bytes=int(95.74 * 1024 * MIB),
    peak_bf16_flops=459e12,
    hbm_bytes_per_s=2765e9,
    mxu_width=128,
    num_lanes=128,
    row_group=16,
)

V5E = Chip(
    name="v5e",
    vmem_bytes=128 * MIB,
    hbm_bytes=int(15.75 * 1024 * MIB),
    peak_bf16_flops=197e12,
    hbm_bytes_per_s=819e9,
    mxu_width=128,
    num_lanes=128,
    row_group=16,
)
