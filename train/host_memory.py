"""Marks in a compiled step: a value goes to the host's memory, or comes back from it.

The compiler makes copies of them that run beside the computation. Only a TPU's does; on a CPU there
is nowhere to go. Source: `torch_xla.experimental.stablehlo_custom_call`, and
`annotate_device_placement` in XLA's HostOffloader.
"""

from torch import Tensor
from torch_xla.experimental import stablehlo_custom_call


def to_host(tensor: Tensor) -> Tensor:
    """The same values, kept in pinned memory of the chip's host from here on."""
    return stablehlo_custom_call.place_to_host(tensor)


def to_device(tensor: Tensor) -> Tensor:
    """The same values, in HBM again."""
    return stablehlo_custom_call.place_to_device(tensor)
