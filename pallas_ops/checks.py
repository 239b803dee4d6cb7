"""Argument checks that several ops share. Each error says which argument, what it got, what to do.

Only shapes, dtypes and devices are read here, so the checks also hold while an op is traced. What
depends on values (group sizes, expert ids) is checked by the CPU kernels, where values are visible.
"""

import torch
from torch import Tensor

from pallas_ops.sharding import OpSharding


def check_rank(op: str, name: str, tensor: Tensor, letters: str) -> None:
    """`tensor` must have one dimension for each of `letters`, say "R, K"."""
    if tensor.ndim != len(letters.split(", ")):
        raise ValueError(f"{op}: {name} has shape {list(tensor.shape)}; expected [{letters}]")


def check_float(op: str, **tensors: Tensor) -> None:
    """Every tensor must be of a floating dtype."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{op}: {name} is {tensor.dtype}; convert it to a floating dtype")


def check_int32(op: str, **tensors: Tensor) -> None:
    """Every tensor must be int32: XLA kernels take no int64, and 2^31 rows are enough."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise ValueError(f"{op}: {name} is {tensor.dtype}; convert it by .to(torch.int32)")


def check_one_device(op: str, **tensors: Tensor) -> None:
    """All tensors must live on the device of the first one."""
    (first, anchor), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.device != anchor.device:
            raise ValueError(
                f"{op}: {name} is on {tensor.device} but {first} is on {anchor.device}; "
                "move them to one device"
            )


def check_float_dtype(op: str, **dtypes: torch.dtype) -> None:
    """Every dtype must be a floating one."""
    for name, dtype in dtypes.items():
        if not dtype.is_floating_point:
            raise ValueError(f"{op}: {name} is {dtype}; give a floating dtype")


def check_product(
    op: str,
    lhs: Tensor,
    rhs: Tensor,
    rhs_letters: str,
    group_sizes: Tensor,
    reduce_dtype: torch.dtype,
    **others: Tensor,
) -> None:
    """What all products of rows [R, K] and grouped matrices ask of their operands but sizes."""
    check_one_device(op, lhs=lhs, rhs=rhs, group_sizes=group_sizes, **others)
    check_float(op, lhs=lhs, rhs=rhs)
    check_float_dtype(op, reduce_dtype=reduce_dtype)
    check_rank(op, "lhs", lhs, "R, K")
    check_rank(op, "rhs", rhs, rhs_letters)


def check_row_shards(op: str, name: str, num_rows: int, sharding: OpSharding | None) -> None:
    """The mesh must split `num_rows` into equal pieces."""
    if sharding is not None and num_rows % sharding.num_row_shards:
        raise ValueError(
            f"{op}: {name} has {num_rows} rows, which {sharding.num_row_shards} row shards "
            f"(axes {sharding.row_axes}) do not divide; pad the batch or change the mesh"
        )


def check_weight_shards(
    op: str, shape: torch.Size, sharding: OpSharding | None, name: str = "rhs"
) -> None:
    """The mesh must split the sharded dimension of a 3-D weight of `shape` into equal pieces."""
    if sharding is None or sharding.weight_dim is None:
        return
    size = shape[sharding.weight_dim]
    if size % sharding.num_weight_shards:
        raise ValueError(
            f"{op}: dim {sharding.weight_dim} of {name} has size {size}, which axis "
            f"{sharding.weight_axis!r} of size {sharding.num_weight_shards} does not divide; "
            "choose another weight_dim, or None"
        )


def check_group_sizes(
    op: str, group_sizes: Tensor, num_groups: int | None, sharding: OpSharding | None
) -> None:
    """`group_sizes` must be int32 [G], or [n, G] for the n row shards of `sharding`."""
    check_int32(op, group_sizes=group_sizes)
    groups = "G" if num_groups is None else num_groups
    expected = f"[{groups}]" if sharding is None else f"[{sharding.num_row_shards}, {groups}]"
    shape = list(group_sizes.shape)
    lead = [] if sharding is None else [sharding.num_row_shards]
    if len(shape) != len(lead) + 1 or shape[:-1] != lead or num_groups not in (None, shape[-1]):
        raise ValueError(
            f"{op}: group_sizes has shape {shape}; expected {expected} (one row for every row "
            "shard when sharding is given)"
        )
    if not shape[-1]:
        raise ValueError(f"{op}: group_sizes has shape {shape}; give at least one group")
