"""One XLA `while` in the lazy graph, from a body that was traced on placeholder tensors.

The counter is s32 and its bound a literal, so XLA knows the trip count (torch_xla's own `scan`
passes it as data, and loop passes that need it do not fire).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor

_XLAC = torch_xla._XLAC


@dataclass
class Computation:
    """One lowered body and where each of its parameters comes from."""

    computation: object
    """The body as an XLA computation: parameters -> (carry, rows)."""
    sources: list[tuple[str, int]]
    """Per parameter: (group, index) with group one of carry, row, constant, hoisted."""
    hoisted: list[Tensor]
    """Device data the trace captured (lifted scalars, small tables)."""
    row_shapes: list[tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype of every per-iteration output, in order."""


def placeholder(like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """A tensor without a value, to trace a body on: of `like`'s dtype, and shape if not given."""
    return xb.create_placeholder_tensor(tuple(like.shape if shape is None else shape), like.dtype)


def lower(
    name: str, outputs: list[Tensor], groups: dict[str, list[Tensor]], num_carry: int
) -> Computation:
    """Lowers traced `outputs`, `num_carry` of carry and then rows, to a computation over the
    placeholders in `groups`."""
    context = _XLAC.lowering.LoweringContext(name)
    context.set_name_string(name)
    context.build(outputs)
    by_id = {}
    for group, tensors in groups.items():
        for index, tensor in enumerate(tensors):
            parameter = context.tensor_parameter_id(tensor)
            if parameter != -1:
                by_id[parameter] = (group, index)
    hoisted = []
    for parameter, tensor in context.device_parameter_id_tensor_mapping().items():
        if parameter not in by_id:
            by_id[parameter] = ("hoisted", len(hoisted))
            hoisted.append(tensor.to(torch_xla.device()))
    assert sorted(by_id) == list(range(len(by_id))), "every HLO parameter has a source"
    return Computation(
        computation=xb.computation_from_module_proto(name, context.hlo()),
        sources=[by_id[i] for i in range(len(by_id))],
        hoisted=hoisted,
        row_shapes=[(tuple(t.shape), t.dtype) for t in outputs[num_carry:]],
    )


def _s32(builder: object, value: int) -> xb.Op:
    return xb.Op.scalar(builder, value, dtype=xb.Type.S32)


def while_loop(
    body: Computation,
    carry: Sequence[Tensor],
    rows: Sequence[Tensor],
    constants: Sequence[Tensor],
    num_iterations: int,
    *,
    reverse: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Emits the `while`: (final carry, the body's rows stacked on dim 0). An iteration reads its
    row of each of `rows` [num_iterations, ...], the last first if `reverse`, and puts the rows it
    makes in the same place."""
    builder = xb.create_builder("layer_loop")
    inputs = [*carry, *rows, *constants, *body.hoisted]
    params = [xb.mkparam(builder, i, xb.tensor_shape(t)) for i, t in enumerate(inputs)]
    first_row = 1 + len(carry)
    first_constant = first_row + len(rows)
    first_hoisted = first_constant + len(constants)
    first_output = first_hoisted + len(body.hoisted)
    start = {"carry": 1, "constant": first_constant, "hoisted": first_hoisted}
    outputs = []
    for shape, dtype in body.row_shapes:
        zero = xb.Op.scalar(builder, 0, dtype=xb.Op.from_torch_type(dtype))
        outputs.append(zero.broadcast((num_iterations, *shape)))

    def condition(counter: xb.Op, *_: xb.Op) -> xb.Op:
        return counter < _s32(counter.builder(), num_iterations)

    def step(*state: xb.Op) -> tuple[xb.Op, ...]:
        counter = state[0]
        inner = counter.builder()
        index = _s32(inner, num_iterations - 1) - counter if reverse else counter
        zero = _s32(inner, 0)

        def row(stacked: xb.Op) -> xb.Op:
            sizes = list(stacked.shape().sizes)
            sliced = stacked.dynamic_slice([index] + [zero] * (len(sizes) - 1), [1, *sizes[1:]])
            return sliced.reshape(sizes[1:])

        arguments = [
            row(state[first_row + i]) if group == "row" else state[start[group] + i]
            for group, i in body.sources
        ]
        result = xb.Op.call(body.computation, arguments, builder=inner)
        new = list(state)
        new[0] = counter + _s32(inner, 1)
        for i in range(len(carry)):
            new[1 + i] = result.get_tuple_element(i)
        for i, (shape, _) in enumerate(body.row_shapes):
            update = result.get_tuple_element(len(carry) + i).broadcast([1])
            at = [index] + [zero] * len(shape)
            new[first_output + i] = state[first_output + i].dynamic_update_slice(update, at)
        return tuple(new)

    loop = xb.Op.mkwhile([_s32(builder, 0), *params, *outputs], condition, step)
    kept = [1 + i for i in range(len(carry))]
    kept += [first_output + i for i in range(len(body.row_shapes))]
    root = xb.Op.tuple([loop.get_tuple_element(i) for i in kept], builder=builder)
    results = _XLAC._xla_user_computation("xla::layer_loop", inputs, root.build("layer_loop"))
    return list(results[: len(carry)]), list(results[len(carry) :])
