"""Large CPU results on recycled memory."""

import functools
import mmap
import weakref
from collections import deque

import torch
from torch import Tensor

_RECYCLED_FROM = 1 << 26
"""Bytes from which recycling pays; the C allocator keeps smaller blocks by itself."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor, on the memory of an earlier one of the same size if one died.

    PyTorch gives large CPU blocks back to the system at once, so a gradient made anew in every
    step pays a page fault for each 4 KiB. Few rows meet large matrices in a grouped product: at 32
    rows an expert those faults take longer than the multiplications (benchmarks/cpu_moe.py).
    At most one idle block of each size is kept, so memory grows by no more than one such result.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes < _RECYCLED_FROM:
        return torch.empty(shape, dtype=dtype)
    idle = _idle_blocks(num_bytes)
    try:
        block = idle.pop()
    except IndexError:
        block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The tensor's storage owns this view and nothing else does: its end is the storage's end.
    view = memoryview(block)
    weakref.finalize(view, idle.append, block).atexit = False
    return torch.frombuffer(view, dtype=dtype).view(shape)


@functools.cache
def _idle_blocks(num_bytes: int) -> deque[mmap.mmap]:
    return deque(maxlen=1)
