"""Kernels that make copies themselves, and what their steps are found by."""

from __future__ import annotations

from collections.abc import Callable

from train.compile.static import dispatch_steps, gmm_steps, tgmm_steps
from train.compile.static.grid_steps import PallasCall
from train.compile.static.kernel_steps import KernelSteps

OWN_COPIES: dict[str, Callable[[PallasCall], KernelSteps]] = {
    "gmm": gmm_steps.find_steps,
    "gmm_gelu_gate": gmm_steps.find_steps,
    "gmm_gate_gradient": gmm_steps.find_steps,
    "tgmm": tgmm_steps.find_steps,
    "expand_rows": dispatch_steps.find_expand_steps,
    "reduce_rows": dispatch_steps.find_reduce_steps,
    "combine_backward": dispatch_steps.find_combine_backward_steps,
}
"""By the kernel's name. All depend on the routing, whose tables the call must know."""
