"""Recomputation of a layer in the backward pass, in a form that a device loop can trace.

`torch.utils.checkpoint` keeps its inputs in a closure, out of sight of saved-tensor hooks; here
they are ordinary saved tensors, so the loop that traces a layer (train/xla_loop.py) sees what must
survive. So are results of single ops that a policy keeps: the second run takes them instead of
running the op.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial, update_wrapper
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pallas_ops  # noqa: F401  registers the ops named below
from torch_gemma4.execution import Body

Barrier = Callable[[list[Tensor]], None]
Policy = Literal["full", "save_global_attention", "save_attention"]
"""What a recomputed layer keeps besides its input, which "full" is without: the result of
`pallas_ops.attention` (and its log normalisers, the two that the op's backward reads) in layers
without a window, or in all layers."""


def recompute_layer(body: Body, *, policy: Policy = "full", barrier: Barrier | None = None) -> Body:
    """`Execution.recompute`: a layer keeps only its inputs and what `policy` adds, and runs again
    in the backward pass (where forward hooks fire again, too). What a policy adds are results of an
    op, so attention by einsum has nothing that it could keep.

    A compiler that sees both runs in one graph merges them, and everything is kept after all. In a
    device loop they lie in different loop bodies. For an unrolled graph give `barrier`, which must
    stop the compiler from seeing that the tensors it gets, replaced in place, are the forward's.
    """
    # A partial, not a closure: it copies and pickles with its model.
    return update_wrapper(partial(_run_recomputed, body, _KEPT[policy], barrier), body)


_ATTENTION = torch.ops.pallas_ops.attention.default
_WINDOW = [argument.name for argument in _ATTENTION._schema.arguments].index("window")
_Keeps = Callable[[Any, tuple], bool]
"""(op, its arguments) -> whether its results are kept."""


def _is_attention(op: Any, args: tuple) -> bool:
    return op is _ATTENTION


def _is_global_attention(op: Any, args: tuple) -> bool:
    return _is_attention(op, args) and args[_WINDOW] is None


_KEPT: dict[str, _Keeps | None] = {
    "full": None,
    "save_global_attention": _is_global_attention,
    "save_attention": _is_attention,
}


def _run_recomputed(
    body: Body,
    keeps: _Keeps | None,
    barrier: Barrier | None,
    carry: Tensor,
    params: dict[str, Tensor],
    constants: tuple[Tensor, ...],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    names = tuple(params)
    carry, *outputs = _Recompute.apply(
        body, keeps, barrier, names, carry, *params.values(), *constants
    )
    return carry, tuple(outputs)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, body, keeps, barrier, names, carry, *tensors):
        ctx.body, ctx.keeps, ctx.barrier, ctx.names = body, keeps, barrier, names
        kept = []
        with nullcontext() if keeps is None else _Record(keeps, kept):
            new_carry, outputs = _run(body, names, carry, tensors)
        ctx.save_for_backward(carry, *tensors, *kept)
        return new_carry, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        needed = ctx.needs_input_grad[4:]
        saved = [t.detach() for t in ctx.saved_tensors]
        grads = list(grads)
        if ctx.barrier is not None:
            saved = [t.clone() for t in saved]
            ctx.barrier(saved + grads)
        inputs, kept = saved[: len(needed)], saved[len(needed) :]
        for tensor, is_needed in zip(inputs, needed, strict=True):
            tensor.requires_grad_(is_needed)
        replay = nullcontext() if ctx.keeps is None else _Replay(ctx.keeps, iter(kept))
        with torch.enable_grad(), replay:
            carry, outputs = _run(ctx.body, ctx.names, inputs[0], inputs[1:])
        results = [(t, g) for t, g in zip((carry, *outputs), grads, strict=True) if t.requires_grad]
        wanted = [t for t in inputs if t.requires_grad]
        found = iter(torch.autograd.grad(*_columns(results, wanted), allow_unused=True))
        return None, None, None, None, *(next(found) if is_needed else None for is_needed in needed)


class _Record(TorchFunctionMode):
    """Lists the results of ops that are kept, in the order they run."""

    def __init__(self, keeps: _Keeps, kept: list[Tensor]) -> None:
        super().__init__()
        self.keeps, self.kept = keeps, kept

    def __torch_function__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if self.keeps(func, args):
            self.kept.extend(results)
        return results


class _Replay(TorchDispatchMode):
    """Gives the kept results, in the same order, to the ops that made them. It acts below autograd,
    so gradients go through the op as if it had run."""

    def __init__(self, keeps: _Keeps, kept: Iterator[Tensor]) -> None:
        super().__init__()
        self.keeps, self.kept = keeps, kept

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.keeps(func, args):
            return func(*args, **(kwargs or {}))
        return tuple(_unwrapped(next(self.kept)) for _ in func._schema.returns)


def _unwrapped(tensor: Tensor) -> Tensor:
    """What an op below autograd returns for `tensor`: a lazy device's tensors have a wrapper, which
    records updates in place, that does not belong there."""
    if not torch._is_functional_tensor(tensor):
        return tensor.detach()
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor)


def _run(body: Body, names: tuple[str, ...], carry: Tensor, tensors) -> tuple:
    params = dict(zip(names, tensors[: len(names)], strict=True))
    return body(carry, params, tuple(tensors[len(names) :]))


def _columns(results: list[tuple[Tensor, Tensor]], wanted: list[Tensor]) -> tuple:
    outputs, grads = zip(*results, strict=True)
    return outputs, wanted, grads
