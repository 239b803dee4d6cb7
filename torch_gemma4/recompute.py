"""Recomputation of a layer in the backward pass, in a form that a device loop can trace.

`torch.utils.checkpoint` keeps its inputs in a closure, out of sight of saved-tensor hooks; here
they are ordinary saved tensors, so the loop that traces a layer (train/xla_loop.py) sees what must
survive.
"""

from collections.abc import Callable
from functools import partial, update_wrapper

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_gemma4.execution import Body

Barrier = Callable[[list[Tensor]], None]


def recompute_layer(body: Body, *, barrier: Barrier | None = None) -> Body:
    """`Execution.recompute`: a layer keeps only its inputs and runs again in the backward pass
    (where forward hooks fire again, too).

    A compiler that sees both runs in one graph merges them, and everything is kept after all. In a
    device loop they lie in different loop bodies. For an unrolled graph give `barrier`, which must
    stop the compiler from seeing that the tensors it gets, replaced in place, are the forward's.
    """
    # A partial, not a closure: it copies and pickles with its model.
    return update_wrapper(partial(_run_recomputed, body, barrier), body)


def _run_recomputed(
    body: Body,
    barrier: Barrier | None,
    carry: Tensor,
    params: dict[str, Tensor],
    constants: tuple[Tensor, ...],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    names = tuple(params)
    carry, *outputs = _Recompute.apply(body, barrier, names, carry, *params.values(), *constants)
    return carry, tuple(outputs)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, body, barrier, names, carry, *tensors):
        ctx.body, ctx.barrier, ctx.names = body, barrier, names
        ctx.save_for_backward(carry, *tensors)
        carry, outputs = _run(body, names, carry, tensors)
        return carry, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        needed = ctx.needs_input_grad[3:]
        inputs = [t.detach() for t in ctx.saved_tensors]
        grads = list(grads)
        if ctx.barrier is not None:
            inputs = [t.clone() for t in inputs]
            ctx.barrier(inputs + grads)
        for tensor, is_needed in zip(inputs, needed, strict=True):
            tensor.requires_grad_(is_needed)
        with torch.enable_grad():
            carry, outputs = _run(ctx.body, ctx.names, inputs[0], inputs[1:])
        results = [(t, g) for t, g in zip((carry, *outputs), grads, strict=True) if t.requires_grad]
        wanted = [t for t in inputs if t.requires_grad]
        found = iter(torch.autograd.grad(*_columns(results, wanted), allow_unused=True))
        return None, None, None, *(next(found) if is_needed else None for is_needed in needed)


def _run(body: Body, names: tuple[str, ...], carry: Tensor, tensors) -> tuple:
    params = dict(zip(names, tensors[: len(names)], strict=True))
    return body(carry, params, tuple(tensors[len(names) :]))


def _columns(results: list[tuple[Tensor, Tensor]], wanted: list[Tensor]) -> tuple:
    outputs, grads = zip(*results, strict=True)
    return outputs, wanted, grads
