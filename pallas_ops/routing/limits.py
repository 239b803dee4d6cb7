"""Which shapes and dtypes the dispatch kernels take."""

import torch

from pallas_ops.chips import MIB, V6E
from pallas_ops.routing.blocks import BLOCK, RING, buffer_rows

_OTHER_VMEM = 24 * MIB
"""What a kernel needs beside its ring: blocks of tokens, and the compiler's own."""


def why_no_kernel(
    width: int, dtype: torch.dtype, top_k: int, num_experts: int, block: int = BLOCK
) -> str | None:
    """Why the kernels of permute and combine do not take rows of `width` and `dtype`, with a
    remedy; None if they do."""
    if dtype != torch.bfloat16:
        return f"rows are {dtype}; convert them to torch.bfloat16"
    if width % V6E.num_lanes or not width:
        return f"rows have width {width}; pad it to a multiple of {V6E.num_lanes}"
    rows = RING * buffer_rows(block, top_k, num_experts)
    ring = rows * width * dtype.itemsize
    limit = V6E.vmem_bytes - _OTHER_VMEM
    if ring > limit:
        return (
            f"{rows} rows of width {width} and {dtype} for blocks of {block} tokens take "
            f"{ring / MIB:.0f} MiB, but {limit / MIB:.0f} MiB of VMEM are free; plan smaller blocks"
        )
    return None
