"""The device loop against python_loop on the CPU, what it traces and keeps, and its HLO."""

import re
from dataclasses import dataclass

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm

from torch_gemma4.execution import Execution, Precision, python_loop
from torch_gemma4.init import init_parameters
from torch_gemma4.model import Gemma4ForCausalLM
from torch_gemma4.presets import micro
from torch_gemma4.recompute import recompute_layer
from train.xla_loop import XlaLoop

ROWS, WIDTH, HIDDEN, LAYERS = 6, 8, 16, 3


def layer(carry, params, constants):
    """A residual layer: a float constant, an integer one, a captured scalar, and outputs of three
    kinds (differentiable, float without gradient, integer)."""
    table, ids = constants
    hidden = torch.tanh(carry @ params["up"] * table.to(carry.dtype)) * SCALE
    new = carry + hidden @ params["down"] + 0.1 * (ids % 3)[:, None].to(carry.dtype)
    load = (hidden.detach() > 0).float().sum(0)
    return new, (hidden.float().square().mean(1), load, ids + 1)


SCALE = 0.7


def arguments(*, lengths=LAYERS, frozen=(), dtype=torch.float32, stack=()):
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "unused": (5,)}
    params = {
        name: (0.5 * torch.randn(lengths, *stack, *shape))
        .to(dtype)
        .requires_grad_(name not in frozen)
        for name, shape in shapes.items()
    }
    constants = (torch.randn(HIDDEN), torch.arange(ROWS, dtype=torch.int32))
    return torch.randn(ROWS, WIDTH).to(dtype).requires_grad_(), params, constants


def to_xla(carry, params, constants):
    def move(tensor):
        return tensor.detach().to("xla").requires_grad_(tensor.requires_grad)

    return move(carry), {n: move(p) for n, p in params.items()}, tuple(map(move, constants))


def run(loop, body, carry, params, constants):
    """Carry, outputs, and the gradient of everything that wants one, zero where it is unused."""
    new, outputs = loop(body, carry, params, constants)
    loss = (new.float() * torch.linspace(-1, 1, WIDTH, device=new.device)).sum()
    loss = loss + outputs[0].square().sum()
    wanted = [t for t in (carry, *params.values()) if t.requires_grad]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return [new, *outputs, *grads]


def assert_same(found, expected, **tolerance):
    xm.unlazy(found)  # one program for all of them
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), **tolerance)


def check(body, *given, loop=None, cpu_body=None, **tolerance):
    expected = run(python_loop, cpu_body or body, *given)
    found = run(loop or XlaLoop(), body, *to_xla(*given))
    assert_same(found, expected, **(tolerance or {"rtol": 1e-5, "atol": 1e-5}))
    return found


# Values and gradients


@pytest.mark.parametrize("wrap", [lambda body: body, recompute_layer], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "options",
    [{}, {"lengths": 1}, {"frozen": ("up",)}, {"frozen": ("up", "down", "unused")}],
    ids=["all", "one iteration", "some frozen", "all frozen"],
)
def test_equals_the_python_loop(wrap, options):
    carry, energy, _, ids, *_ = check(wrap(layer), *arguments(**options))
    assert carry.requires_grad and energy.requires_grad and not ids.requires_grad
    assert ids.dtype == torch.int32


def test_a_carry_that_wants_no_gradient():
    carry, params, constants = arguments()
    check(layer, carry.detach(), params, constants)


def test_an_unused_parameter_has_gradient_zero_not_none():
    carry, params, constants = to_xla(*arguments())
    XlaLoop()(layer, carry, params, constants)[0].sum().backward()
    assert torch.equal(params["unused"].grad.cpu(), torch.zeros(LAYERS, 5))


def test_bf16_is_as_near_to_float32_as_on_the_cpu():
    carry, params, constants = arguments(dtype=torch.bfloat16)
    wide = {name: p.detach().float().requires_grad_() for name, p in params.items()}
    exact = run(python_loop, layer, carry.detach().float().requires_grad_(), wide, constants)
    plain = run(python_loop, layer, carry, params, constants)
    found = run(XlaLoop(), layer, *to_xla(carry, params, constants))
    xm.unlazy(found)
    for ours, theirs, truth in zip(found, plain, exact, strict=True):
        assert ours.dtype == theirs.dtype
        error = (ours.detach().cpu().float() - truth.float()).norm()
        assert error <= 1.25 * (theirs.float() - truth.float()).norm()


def test_no_grad_mode_runs_the_forward_loop_alone():
    given = arguments()
    loop = XlaLoop()
    with torch.no_grad():
        expected = python_loop(layer, *given)
        carry, outputs = loop(layer, *to_xla(*given))
    assert_same([carry, *outputs], [expected[0], *expected[1]])
    assert not carry.requires_grad
    (trace,) = loop._traces.values()
    assert trace.backward is None and len(trace.forward.row_shapes) == len(outputs)


def test_without_outputs_and_with_inputs_as_outputs():
    def silent(carry, params, constants):
        return carry * params["w"], ()

    def echo(carry, params, constants):
        return carry, (params["w"], constants[0])

    carry, w, k = torch.randn(4), torch.randn(LAYERS, 4), torch.arange(2)
    for body in (silent, echo):
        ours = XlaLoop()(body, carry.to("xla"), {"w": w.to("xla")}, (k.to("xla"),))
        theirs = python_loop(body, carry, {"w": w}, (k,))
        assert_same([ours[0], *ours[1]], [theirs[0], *theirs[1]])


def nested(loop, inner):
    """A body that loops over its own stack, then runs one more layer of its own."""

    def period(carry, params, constants):
        stack = {n.removeprefix("stack."): p for n, p in params.items() if n.startswith("stack.")}
        carry, outputs = loop(inner, carry, stack, constants)
        carry, last = inner(carry, {n: params[n] for n in ("up", "down")}, constants)
        columns = zip(outputs, last, strict=True)
        return carry, tuple(torch.cat((many, one[None])) for many, one in columns)

    return period


@pytest.mark.parametrize("wrap", [lambda body: body, recompute_layer], ids=["kept", "recomputed"])
def test_nested_loops_equal_nested_python_loops(wrap):
    carry, alone, constants = arguments(lengths=2)
    _, stacked, _ = arguments(lengths=2, stack=(LAYERS,))
    params = alone | {f"stack.{name}": p for name, p in stacked.items()}
    loop, inner = XlaLoop(), wrap(layer)
    found = check(
        nested(loop, inner),
        *(carry, params, constants),
        loop=loop,
        cpu_body=nested(python_loop, layer),
    )
    assert found[1].shape == (2, LAYERS + 1, ROWS)


def test_gradients_pass_through_the_annotation_by_name():
    seen = []

    def annotate(name, grad):
        seen.append((name, tuple(grad.shape)))
        return grad * 2

    given = arguments(frozen=("unused",))
    plain = run(python_loop, layer, *given)
    found = run(XlaLoop(annotate), layer, *to_xla(*given))
    assert seen == [("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))]
    expected = [*plain[:-2], *(2 * grad for grad in plain[-2:])]
    assert_same(found, expected, rtol=1e-5, atol=1e-5)


# Traces


def test_a_second_call_traces_nothing_and_a_new_signature_does():
    calls = []

    def counted(carry, params, constants):
        calls.append(tuple(carry.shape))
        return layer(carry, params, constants)

    loop = XlaLoop()
    carry, params, constants = to_xla(*arguments())
    for _ in range(3):
        run(loop, counted, carry, params, constants)
    assert calls == [(ROWS, WIDTH)] and len(loop._traces) == 1
    # Other values, the same trace.
    given = arguments()
    assert_same(
        run(loop, counted, *to_xla(*given)), run(python_loop, layer, *given), rtol=1e-5, atol=1e-5
    )
    assert len(calls) == 1
    # Another number of rows, of layers, another dtype, no gradients, another body.
    two_rows = (carry.detach()[:2].requires_grad_(), params, (constants[0], constants[1][:2]))
    run(loop, counted, *two_rows)
    run(loop, counted, carry, {n: p.detach()[:2] for n, p in params.items()}, constants)
    run(loop, counted, *to_xla(*arguments(dtype=torch.bfloat16)))
    with torch.no_grad():
        loop(counted, carry, params, constants)
    assert len(calls) == len(loop._traces) == 5
    run(loop, layer, carry, params, constants)
    assert len(loop._traces) == 6 and len(calls) == 5


def test_equal_bodies_share_a_trace():
    @dataclass(frozen=True)
    class Scale:
        factor: float

        def __call__(self, carry, params, constants):
            return carry * params["w"] * self.factor, ()

    loop = XlaLoop()
    carry, w = torch.randn(3).to("xla"), torch.randn(LAYERS, 3).to("xla")
    for factor in (2.0, 2.0, 3.0):
        found, _ = loop(Scale(factor), carry, {"w": w}, ())
        torch.testing.assert_close(found.cpu(), (carry * (w * factor).prod(0)).cpu())
    assert len(loop._traces) == 2


def rows_kept(trace):
    """Shapes that a traced body keeps of each iteration for its backward pass."""
    return [shape for shape, _ in trace.forward.row_shapes[trace.num_outputs :]]


def test_with_recomputation_only_the_carry_is_kept():
    loop = XlaLoop()
    run(loop, recompute_layer(layer), *to_xla(*arguments()))
    (trace,) = loop._traces.values()
    assert rows_kept(trace) == [(ROWS, WIDTH)]


def test_without_recomputation_parameters_and_constants_are_not_kept_again():
    def scale(carry, params, constants):
        return carry * params["w"] * constants[0], ()

    loop = XlaLoop()
    carry, w = torch.randn(4, 7), torch.randn(LAYERS, 4, 7)
    inputs = [t.to("xla").requires_grad_() for t in (carry, w)]
    loop(scale, inputs[0], {"w": inputs[1]}, (torch.randn(7).to("xla"),))
    (trace,) = loop._traces.values()
    # carry (for w) and carry * w (never needed, as the constant has no gradient).
    assert rows_kept(trace) == [(4, 7)]


def test_a_recomputed_model_keeps_one_carry_a_layer():
    """Also of the layer that is alone in its segment: no copy of its parameters."""
    loop = XlaLoop()
    execution = Execution(Precision.uniform(torch.float32), loop=loop, recompute=recompute_layer)
    model = Gemma4ForCausalLM(micro(), execution)
    init_parameters(model, seed=0)
    ids = torch.randint(0, 64, (2, 16)).to("xla")
    model.to("xla").loss(ids, ids)
    inner, outer, _loss_tiles = loop._traces.values()
    assert rows_kept(inner) == [(2, 16, 32)]
    assert rows_kept(outer) == [(2, 2, 16, 32), (2, 16, 32)]


# HLO


def hlo_of(tensors):
    return torch_xla._XLAC._get_xla_tensors_hlo(list(tensors))


def trip_counts(hlo):
    """Literal bounds of all `while` loops, read from the text of their conditions."""
    bounds = []
    for condition in re.findall(r"\bwhile\(.*condition=%?([\w.-]+)", hlo):
        text = hlo.split(f"%{condition} (")[1].split("\n}")[0]
        (root,) = re.findall(r"ROOT .* compare\(s32\[\] \S+, s32\[\] (\S+)\), direction=LT", text)
        (bound,) = re.findall(rf"{re.escape(root)} = s32\[\] constant\((\d+)\)", text)
        bounds.append(int(bound))
    return bounds


def test_forward_and_backward_are_one_while_each_with_a_literal_trip_count():
    given = to_xla(*arguments())
    found = run(XlaLoop(), recompute_layer(layer), *given)
    assert trip_counts(hlo_of(found)) == [LAYERS, LAYERS]
    assert trip_counts(hlo_of(found[:1])) == [LAYERS]


def test_size_of_the_program_does_not_grow_with_depth():
    sizes = [
        len(hlo_of(run(XlaLoop(), layer, *to_xla(*arguments(lengths=n)))).splitlines())
        for n in (2, 9)
    ]
    assert sizes[0] == sizes[1]


def test_loops_of_a_nest_all_have_literal_trip_counts():
    carry, alone, constants = arguments(lengths=2)
    _, stacked, _ = arguments(lengths=2, stack=(LAYERS,))
    params = alone | {f"stack.{name}": p for name, p in stacked.items()}
    loop = XlaLoop()
    found = run(loop, nested(loop, layer), *to_xla(carry, params, constants))
    assert sorted(trip_counts(hlo_of(found))) == [2, 2, LAYERS, LAYERS]


def test_an_unrolled_recomputation_stands_behind_a_barrier():
    """The other way to keep a compiler from merging both runs (train/build.py, layers = "loop")."""
    barred = recompute_layer(layer, barrier=xm.optimization_barrier_)
    given = arguments(lengths=2)
    on_xla = to_xla(*given)
    found = run(python_loop, barred, *on_xla)
    assert len(re.findall(r" = \(.* opt-barrier\(", hlo_of(found))) == 2
    assert "opt-barrier" not in hlo_of([on_xla[0] * 2])  # arguments are as they were
    assert_same(found, run(python_loop, layer, *given), rtol=1e-5, atol=1e-5)


# Refusals


def refused(match, body, *given):
    with pytest.raises(ValueError, match=match):
        XlaLoop()(body, *given)


def test_a_body_that_changes_its_carry_is_refused():
    given = to_xla(*arguments())

    def narrower(carry, params, constants):
        return carry.bfloat16(), ()

    def shorter(carry, params, constants):
        return carry[1:], ()

    message = r"must keep the carry's shape and dtype, got \(6, 8\) torch.bfloat16 from \(6, 8\) t"
    refused(message, narrower, *given)
    refused(r"got \(5, 8\) torch.float32 from \(6, 8\) torch.float32", shorter, *given)
    with torch.no_grad():
        refused(message, narrower, *given)


def test_unequal_or_absent_lengths_are_refused():
    carry, params, constants = to_xla(*arguments())
    message = "need one common length of at least 1, got "
    shorter = params | {"down": params["down"][:2]}
    refused(message + "{'up': 3, 'down': 2, 'unused': 3}", layer, carry, shorter, constants)
    refused(message + "{}", layer, carry, {}, constants)
    empty = {name: p[:0] for name, p in params.items()}
    refused(message + "{'up': 0, 'down': 0, 'unused': 0}", layer, carry, empty, constants)


def test_a_constant_that_requires_grad_is_refused():
    carry, params, constants = to_xla(*arguments())
    constants[0].requires_grad_()
    refused(
        r"constants\[0\] requires grad and would get none; pass", layer, carry, params, constants
    )


@pytest.mark.parametrize("place", ["carry", "down", r"constants\[1\]"])
def test_cpu_tensors_are_refused_by_name(place):
    carry, params, constants = to_xla(*arguments())
    if place == "carry":
        carry = carry.cpu()
    elif place == "down":
        params["down"] = params["down"].cpu()
    else:
        constants = (constants[0], constants[1].cpu())
    refused(f"{place} is on cpu, expected an XLA device; CPU", layer, carry, params, constants)


def test_differentiating_twice_is_refused():
    carry, params, constants = to_xla(*arguments())
    new, _ = XlaLoop()(layer, carry, params, constants)
    (grad,) = torch.autograd.grad(new.square().sum(), carry, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiate twice a function .*once_differentiable"):
        grad.sum().backward()
