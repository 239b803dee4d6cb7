"""How the operands of an op lie on the device mesh."""

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import prod
from typing import Literal

Target = Literal["cpu", "tpu"]
"""A lowering target: Pallas kernels interpreted as HLO, or compiled by Mosaic."""


@dataclass(frozen=True)
class OpSharding:
    """Layout of one op on a mesh: tokens stay where they are, weights are gathered for use.

    A custom op takes only tensors, numbers and strings, so this travels as `to_json()`; `None`
    (one device) travels as the empty string, see `encode` and `decode`.

    Raises:
        ValueError: an axis twice, an axis of size < 1, an axis name the mesh does not have, or a
            sharded weight whose axis does not split the rows.
    """

    mesh: tuple[tuple[str, int], ...]
    """Axes of the device mesh, outermost first, each (name, size)."""
    row_axes: tuple[str, ...]
    """Axes over which token rows are split, outermost first."""
    weight_axis: str = "fsdp"
    """Axis over which weights are stored sharded."""
    weight_dim: int | None = 0
    """Sharded dimension of a [E, ., .] weight; None = every device holds the whole weight."""
    target: Target | None = None
    """What XLA kernels are lowered for; None = the runtime of this process. "tpu" on a host without
    one gives a graph for ahead-of-time compilation."""

    def __post_init__(self):
        names = [name for name, _ in self.mesh]
        if len(set(names)) != len(names):
            raise ValueError(f"mesh has axes {names}; give every axis its own name")
        for name, size in self.mesh:
            if size < 1:
                raise ValueError(f"mesh axis {name!r} has size {size}; sizes must be at least 1")
        if len(set(self.row_axes)) != len(self.row_axes):
            raise ValueError(f"row_axes is {self.row_axes}; name every axis once")
        for field, axes in (("row_axes", self.row_axes), ("weight_axis", (self.weight_axis,))):
            for axis in axes:
                if axis not in names:
                    raise ValueError(f"{field} names axis {axis!r}; the mesh has only {names}")
        if self.target not in (None, "cpu", "tpu"):
            raise ValueError(f"target is {self.target!r}; use 'cpu', 'tpu' or None (the runtime's)")
        if self.weight_dim not in (None, 0, 1, 2):
            raise ValueError(f"weight_dim is {self.weight_dim}; use 0, 1, 2 or None (replicated)")
        if self.weight_dim is not None and self.weight_axis not in self.row_axes:
            raise ValueError(
                f"weight_axis {self.weight_axis!r} is none of row_axes {self.row_axes}: weight "
                "gradients are summed over it, so it must split the rows; or give weight_dim=None"
            )

    @property
    def num_row_shards(self) -> int:
        """Number of pieces the token rows are split into."""
        return prod(dict(self.mesh)[axis] for axis in self.row_axes)

    @property
    def num_weight_shards(self) -> int:
        """Number of pieces a weight is split into."""
        return 1 if self.weight_dim is None else dict(self.mesh)[self.weight_axis]

    def row_spec(self, ndim: int) -> tuple[tuple[str, ...] | None, ...]:
        """Layout of an [R, ...] operand of `ndim` dimensions: rows split, the rest whole."""
        return (self.row_axes, *(None,) * (ndim - 1))

    @property
    def weight_spec(self) -> tuple[str | None, ...]:
        """Layout of an [E, ., .] weight."""
        return tuple(self.weight_axis if dim == self.weight_dim else None for dim in range(3))

    def to_json(self) -> str:
        """A stable string: equal layouts give equal strings."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    @lru_cache
    def from_json(cls, text: str) -> "OpSharding":
        """Inverse of `to_json`."""
        fields = json.loads(text)
        mesh = tuple((name, size) for name, size in fields.pop("mesh"))
        return cls(mesh=mesh, row_axes=tuple(fields.pop("row_axes")), **fields)


def encode(sharding: OpSharding | None) -> str:
    """The string argument of an op for `sharding`."""
    return "" if sharding is None else sharding.to_json()


def decode(text: str) -> OpSharding | None:
    """Inverse of `encode`."""
    return OpSharding.from_json(text) if text else None


def num_row_shards(sharding: OpSharding | None) -> int:
    """Number of pieces the token rows are split into; 1 on one device."""
    return 1 if sharding is None else sharding.num_row_shards
