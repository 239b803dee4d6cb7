"""How the model runs, as against what it computes: dtypes, the loop over layers, recomputation,
sharding. Everything here may change without changing the mathematics."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from pallas_ops import OpSharding

Body = Callable[[Tensor, dict[str, Tensor], tuple[Tensor, ...]], tuple[Tensor, tuple[Tensor, ...]]]
"""One iteration: (carry, parameters of one iteration, constants) -> (carry, outputs)."""


class LayerLoop(Protocol):
    """Runs `body` over parameters stacked on dim 0 and stacks its outputs on dim 0.

    `body` is hashable, and equal bodies do the same, so that a loop may cache what it traces.
    Constants are read by every iteration and never require grad.
    """

    def __call__(
        self, body: Body, carry: Tensor, params: dict[str, Tensor], constants: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]: ...


def python_loop(
    body: Body, carry: Tensor, params: dict[str, Tensor], constants: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The LayerLoop of plain torch. `unbind` makes each gradient one stack instead of a sum of
    zero-padded slices."""
    outputs = []
    for row in zip(*(stacked.unbind() for stacked in params.values()), strict=True):
        carry, output = body(carry, dict(zip(params, row, strict=True)), constants)
        outputs.append(output)
    return carry, tuple(torch.stack(column) for column in zip(*outputs, strict=True))


Constrain = Callable[[Tensor, str], Tensor]
"""(tensor, role) -> the same values, with its layout on the mesh stated."""


def keep_layout(tensor: Tensor, name: str) -> Tensor:
    """`Execution.constrain` of one device: nothing to say about layouts."""
    return tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums and transcendental functions of `dtype`: at least float32."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Precision:
    """Dtypes of training. Raises ValueError for a dtype that is not floating point."""

    params: torch.dtype = torch.float32
    """Of parameters, hence of gradients and of optimizer state."""
    compute: torch.dtype = torch.bfloat16
    """Of activations and matrix products. Norms, router, rotary embedding, attention scores and
    losses compute in at least float32 whatever this is."""
    reduce: torch.dtype = torch.float32
    """Of weight gradients while they are summed over the mesh: experts' in this dtype, those of
    other matrices in the wider of this and `compute`."""

    def __post_init__(self) -> None:
        for name in ("params", "compute", "reduce"):
            value = getattr(self, name)
            if not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise ValueError(f"{name} = {value!r}: give a floating-point torch.dtype")

    @classmethod
    def uniform(cls, dtype: torch.dtype) -> "Precision":
        """One dtype for everything."""
        return cls(dtype, dtype, dtype)


@dataclass(frozen=True)
class Execution:
    """How a model runs. The default is plain torch on one device."""

    precision: Precision = Precision()
    """Dtypes."""
    sharding: OpSharding | None = None
    """How tokens and expert weights lie on the mesh; None is one device."""
    attention: Literal["einsum", "kernel"] = "einsum"
    """"einsum" holds all scores of a layer, [B, N, S, S]; "kernel" is `pallas_ops.attention`, which
    holds a block of them, after `pallas_ops.norm_rope`, which normalises and turns in one pass."""
    dispatch: Literal["gather", "kernel"] = "gather"
    """How tokens go to experts and come back: row by row, or block by block in the kernels of
    `pallas_ops.permute` and `combine`, see `routing_plan`."""
    fence_expert_gathers: bool = False
    """The router of a layer waits until its expert weights are gathered (`pallas_ops.gather_fence`)
    so that those gathers are begun before it; no value changes."""
    loop: LayerLoop = python_loop
    """Runs the layers, and the tiles of the loss."""
    recompute: Callable[[Body], Body] | None = None
    """Wraps the body of one layer so that it is computed again in backward (see `recompute_layer`);
    None keeps activations."""
    constrain: Constrain = keep_layout
    """States the layout of a tensor by its role: "hidden" [B, S, D] at each layer's entry, "rows"
    [B, S, .] or [T, .], anything else split by tokens; "weight" [out, in], a matrix in the compute
    dtype as a product reads it; "table" [V, D], the embedding in the compute dtype, read by the
    look-up and by every loss tile; "table_gradient" [V, D], the gradient of the parameter behind
    it, at the end of its sums; "copies" [..., n, D], a copy of D numbers for each row shard."""
