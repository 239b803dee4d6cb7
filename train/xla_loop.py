"""A loop over stacked layers as one XLA `while`, differentiable, with a constant trip count.

`XlaLoop` satisfies the model's LayerLoop protocol (torch_gemma4/execution.py): the body is traced
once on placeholder tensors and becomes the body of a `while`, so thirty layers compile like one.

How it works, for a body (carry, params, constants) -> (carry, outputs):

- forward `while`: carry -> body -> carry; outputs and saved values are stacked, a row an iteration;
- backward `while`, in reverse order: gradient of the carry -> backward of the body -> gradient of
  the carry; gradients of params are stacked.

Which values are saved is what autograd itself would save: the trace runs under
`torch.autograd.graph.saved_tensors_hooks`, so every differentiable thing works (plain ops, custom
ops, autograd.Functions, a nested XlaLoop) and recomputation is the body's own business (see
torch_gemma4/execution.py, `recompute`). Invariants:

- a saved value that is a parameter or a constant is never stacked: the backward loop reads it
  again;
- the forward body lives in one `while` and the recomputed body in another, so the compiler cannot
  merge them and undo the recomputation: no optimization barrier is needed;
- with `offload`, saved values lie in the host's memory between the two loops. Of nested loops it is
  the outermost that sends them, a turn's at once: to XLA a stack on the host cannot become a row of
  another.

The traced pair is cached by (body, shapes, dtypes, which inputs want gradients): equal bodies must
be the same pure function of their arguments. Tensors they capture are read at trace time, stay
constants and get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch_xla
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_gemma4.execution import Body
from train.host_memory import to_device, to_host
from train.xla_while import Computation, lower, placeholder, while_loop

_XLAC = torch_xla._XLAC

GradAnnotation = Callable[[str, Tensor], Tensor]
"""(parameter's name, its gradient of one iteration) -> that gradient, annotated."""


@dataclass
class _Trace:
    """A body traced for one signature."""

    forward: Computation
    """Rows: the body's outputs, then saved values."""
    num_outputs: int
    """How many of those rows are outputs."""
    backward: Computation | None = None
    """Carry: the carry's gradient; rows: gradients of parameters. None without gradients."""
    grad_outputs: list[int] = field(default_factory=list)
    """Outputs that carry a gradient."""
    grad_params: list[int] = field(default_factory=list)
    """Parameters that receive one."""


def _identity(tensor: Tensor) -> Tensor:
    return tensor


class _LoopFunction(torch.autograd.Function):
    """The two loops of a trace as one differentiable function. Twice differentiating it raises
    RuntimeError."""

    @staticmethod
    def forward(ctx, trace: _Trace, num_iterations: int, num_constants: int, carry, *tensors):
        constants, params = tensors[:num_constants], tensors[num_constants:]
        (carry_out,), rows = while_loop(
            trace.forward, [carry], params, constants, num_iterations, reverse=False
        )
        outputs, stacked = rows[: trace.num_outputs], rows[trace.num_outputs :]
        ctx.trace, ctx.num_iterations, ctx.num_constants = trace, num_iterations, num_constants
        ctx.save_for_backward(*tensors, *stacked)
        ctx.mark_non_differentiable(
            *(t for i, t in enumerate(outputs) if i not in trace.grad_outputs)
        )
        return carry_out, *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_carry, *grads):
        trace, num_constants = ctx.trace, ctx.num_constants
        saved = ctx.saved_tensors
        num_tensors = len(saved) - (len(trace.forward.row_shapes) - trace.num_outputs)
        constants, params = saved[:num_constants], saved[num_constants:num_tensors]
        rows = [*params, *saved[num_tensors:], *(grads[i] for i in trace.grad_outputs)]
        (grad_carry,), grad_rows = while_loop(
            trace.backward, [grad_carry], rows, constants, ctx.num_iterations, reverse=True
        )
        grad_params: list[Tensor | None] = [None] * len(params)
        for i, grad in zip(trace.grad_params, grad_rows, strict=True):
            grad_params[i] = grad
        return None, None, None, grad_carry, *([None] * num_constants), *grad_params


def _trace_body(
    body: Body,
    carry: Tensor,
    params: dict[str, Tensor],
    constants: tuple[Tensor, ...],
    with_grad: bool,
    annotate_grad: GradAnnotation | None,
    offload: bool,
) -> _Trace:
    """Runs the body once on placeholders shaped as the arguments (params as one row of theirs), and
    its backward pass if `with_grad`, and lowers both."""
    names = list(params)
    carry_in = placeholder(carry)
    constants_in = [placeholder(t) for t in constants]
    params_in = [placeholder(t, t.shape[1:]) for t in params.values()]
    forward_groups = {"carry": [carry_in], "row": params_in, "constant": constants_in}

    if not with_grad:
        with torch.no_grad():
            carry_out, outputs = body(
                carry_in, dict(zip(names, params_in, strict=True)), tuple(constants_in)
            )
        _check_carry(carry_in, carry_out)
        forward = lower("layer_forward", [carry_out, *outputs], forward_groups, 1)
        return _Trace(forward, len(outputs))

    carry_in.requires_grad_()
    for param_in, param in zip(params_in, params.values(), strict=True):
        param_in.requires_grad_(param.requires_grad)

    # Identity of a saved value: torch_xla gives every lazy tensor an id that autograd's aliases
    # share.
    known = {_XLAC._xla_get_tensor_id(t): ("param", i) for i, t in enumerate(params_in)}
    known |= {_XLAC._xla_get_tensor_id(t): ("constant", i) for i, t in enumerate(constants_in)}
    stacked: list[Tensor] = []
    replay: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
    """The backward's placeholders, each with what it computes with: itself, or what comes back from
    the host for it."""

    def pack(tensor: Tensor) -> tuple[str, int] | Tensor:
        if tensor.device.type != "xla":
            return tensor
        key = _XLAC._xla_get_tensor_id(tensor)
        if key not in known:
            known[key] = ("stacked", len(stacked))
            stacked.append(to_host(tensor.detach()) if offload else tensor.detach())
        return known[key]

    def unpack(slot: tuple[str, int] | Tensor) -> Tensor:
        if isinstance(slot, Tensor):
            return slot
        if slot not in replay:
            group, index = slot
            values = {"param": params_in, "constant": constants_in, "stacked": stacked}[group]
            row = placeholder(values[index])
            replay[slot] = row, to_device(row) if offload and group == "stacked" else row
        return replay[slot][1]

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        carry_out, outputs = body(
            carry_in, dict(zip(names, params_in, strict=True)), tuple(constants_in)
        )
    _check_carry(carry_in, carry_out)
    forward = lower("layer_forward", [carry_out, *outputs, *stacked], forward_groups, 1)

    grad_outputs = [i for i, t in enumerate(outputs) if t.requires_grad]
    grad_params = [i for i, t in enumerate(params_in) if t.requires_grad]
    grad_carry = placeholder(carry_out)
    cotangents = [placeholder(outputs[i]) for i in grad_outputs]
    grads = torch.autograd.grad(
        [carry_out, *(outputs[i] for i in grad_outputs)],
        [carry_in, *(params_in[i] for i in grad_params)],
        [grad_carry, *cotangents],
        allow_unused=True,
        materialize_grads=True,
    )
    grads = list(grads)
    if annotate_grad is not None:
        grads[1:] = [
            annotate_grad(names[i], g) for i, g in zip(grad_params, grads[1:], strict=True)
        ]

    def slots(group: str, count: int) -> list[Tensor]:
        """The backward's placeholder of every value of a group, a fresh one for a value it never
        reads."""
        for i in range(count):
            unpack((group, i))
        return [replay[group, i][0] for i in range(count)]

    backward_rows = slots("param", len(params_in)) + slots("stacked", len(stacked)) + cotangents
    backward = lower(
        "layer_backward",
        grads,
        {
            "carry": [grad_carry],
            "row": backward_rows,
            "constant": slots("constant", len(constants_in)),
        },
        1,
    )
    return _Trace(forward, len(outputs), backward, grad_outputs, grad_params)


def _check_carry(before: Tensor, after: Tensor) -> None:
    if after.shape != before.shape or after.dtype != before.dtype:
        raise ValueError(
            "layer loop: the body must keep the carry's shape and dtype, got "
            f"{tuple(after.shape)} {after.dtype} from {tuple(before.shape)} {before.dtype}"
        )


def _check_arguments(
    carry: Tensor, params: dict[str, Tensor], constants: tuple[Tensor, ...]
) -> int:
    """The trip count. Raises ValueError for what a loop cannot run on."""
    places = {"carry": carry, **{f"constants[{i}]": t for i, t in enumerate(constants)}, **params}
    for name, tensor in places.items():
        if tensor.device.type != "xla":
            raise ValueError(
                f"layer loop: {name} is on {tensor.device}, expected an XLA device; CPU tensors "
                "take torch_gemma4.execution.python_loop"
            )
    lengths = {name: t.shape[0] for name, t in params.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(
            f"layer loop: stacked parameters need one common length of at least 1, got {lengths}"
        )
    for i, tensor in enumerate(constants):
        if tensor.requires_grad:
            raise ValueError(
                f"layer loop: constants[{i}] requires grad and would get none; pass it as a "
                "stacked parameter, or detached"
            )
    return next(iter(lengths.values()))


class XlaLoop:
    """LayerLoop on XLA tensors: one compiled `while` for a stack of equal layers.

    Calling it with (body, carry, params, constants): `carry` is any tensor, whose shape and dtype
    the body keeps; `params` maps names to tensors [n, ...] of one n >= 1, the trip count;
    `constants` are tensors that every iteration reads. Returns (carry, outputs stacked on dim 0),
    as `python_loop` does, differentiable once with respect to carry and params; a parameter that
    the body does not use has gradient zero.

    Raises ValueError for tensors elsewhere than on an XLA device, for unequal lengths or none, for
    a constant that requires grad, and for a body that changes the carry's shape or dtype.
    """

    def __init__(
        self, annotate_grad: GradAnnotation | None = None, *, offload: bool = False
    ) -> None:
        """`annotate_grad(name, gradient of one iteration)` pins the gradient's sharding inside the
        loop; None leaves it open. `offload` keeps what autograd saves in the host's memory until
        the backward loop, which only a TPU can."""
        self._annotate_grad = annotate_grad
        self._offload = offload
        self._is_tracing = False
        self._traces: dict[tuple, _Trace] = {}

    def __call__(
        self, body: Body, carry: Tensor, params: dict[str, Tensor], constants: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        num_iterations = _check_arguments(carry, params, constants)
        tensors = (carry, *constants, *params.values())
        with_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        signature = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        offload = self._offload and not self._is_tracing
        key = (body, with_grad, offload, tuple(params), len(constants), signature)
        if key not in self._traces:
            was_tracing, self._is_tracing = self._is_tracing, True
            try:
                # A loop traced inside another's trace must not save through the outer one's hooks.
                with torch.autograd.graph.saved_tensors_hooks(_identity, _identity):
                    self._traces[key] = _trace_body(
                        *(body, carry, params, constants, with_grad, self._annotate_grad, offload)
                    )
            finally:
                self._is_tracing = was_tracing
        trace = self._traces[key]
        if not with_grad:
            (carry_out,), outputs = while_loop(
                trace.forward,
                [carry],
                list(params.values()),
                constants,
                num_iterations,
                reverse=False,
            )
            return carry_out, tuple(outputs)
        carry_out, *outputs = _LoopFunction.apply(
            trace, num_iterations, len(constants), carry, *constants, *params.values()
        )
        return carry_out, tuple(outputs)
