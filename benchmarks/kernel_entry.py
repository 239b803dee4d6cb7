"""One kernel at one shape, as `benchmarks.kernel_profile` needs to know it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from train.compile.static.step_time import Visit

Signature = tuple[tuple[tuple[int, ...], str], ...]


@dataclass(frozen=True)
class Kernel:
    """One kernel at one shape."""

    op: str
    """The op's name."""
    shape: str
    """The shape's name."""
    fn: Callable[..., Any]
    """Module-level JAX function, called with `interpret`."""
    signature: Signature
    """Shape and dtype name of its arguments."""
    flops: int
    """Useful multiplications and additions."""
    compiled_name: str
    """Name of the kernel in the compiler's dump."""
    static: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `fn`."""
    visits: tuple[Visit, ...] | None = ()
    """When each region of the body runs; None = as the body says (train/compile/static/visits).
    Kernels of train/compile/static/own_copies.py leave it out."""
    routed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Arguments that are group sizes, by position: rows, groups."""
    is_pallas: bool = True
    """Whether it is a Pallas call; else a fusion of XLA."""
    libtpu_flags: tuple[str, ...] = ()
    """More of LIBTPU_INIT_ARGS."""
    published_ms: float | None = None
    """Time measured by others on a v6e."""
    note: str = ""
    """Why the estimate is off the published time."""
    is_tiny: bool = False
    """Whether it is for tests, and run only when named."""
