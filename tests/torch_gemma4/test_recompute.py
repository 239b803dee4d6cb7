"""Recomputing a layer changes what is kept, and nothing else."""

import copy
import pickle
from functools import partial
from unittest.mock import Mock, patch

import pytest
import torch

from pallas_ops.attention import reference
from torch_gemma4 import Execution, Gemma4ForCausalLM, Precision, init_parameters
from torch_gemma4.presets import micro
from torch_gemma4.recompute import recompute_layer

WIDTH = 8
COUNTS = torch.arange(4, dtype=torch.int32)


def body(carry, params, constants):
    """Two matrix products, an integer constant, an output that is used and two that are not
    differentiable (one by dtype)."""
    table, counts = constants
    hidden = torch.tanh(carry @ params["up"] * table)
    new = carry + hidden @ params["down"]
    return new, (hidden.square().mean(1), counts + 1, (hidden > 0).float().sum())


def arguments(frozen=()):
    shapes = {"up": (WIDTH, 16), "down": (16, WIDTH), "unused": (3,)}
    carry = torch.randn(4, WIDTH, requires_grad=True)
    params = {n: torch.randn(s).requires_grad_(n not in frozen) for n, s in shapes.items()}
    return carry, params, (torch.randn(16), COUNTS)


def run(layer, carry, params, constants):
    """Outputs, and gradients of everything that wants one."""
    new, (energy, counts, active) = layer(carry, params, constants)
    wanted = [t for t in (carry, *params.values()) if t.requires_grad]
    loss = (new * torch.linspace(-1, 1, WIDTH)).sum() + energy.square().sum()
    return (new, energy, counts, active), torch.autograd.grad(loss, wanted, allow_unused=True)


@pytest.mark.parametrize("frozen", [(), ("up",), ("up", "down")])
def test_values_and_gradients_are_the_same_bits(frozen):
    given = arguments(frozen)
    outputs, grads = run(body, *given)
    again, grads_again = run(recompute_layer(body), *given)
    for found, expected in zip((*again, *grads_again), (*outputs, *grads), strict=True):
        if expected is None:
            assert found is None
            continue
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert not again[2].requires_grad  # integers


def test_a_carry_that_wants_no_gradient():
    carry, params, constants = arguments()
    expected = run(body, carry.detach(), params, constants)[1]
    found = run(recompute_layer(body), carry.detach(), params, constants)[1]
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_only_inputs_are_saved():
    carry, params, constants = arguments()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        body(carry, params, constants)
        plain = len(saved)
        saved.clear()
        recompute_layer(body)(carry, params, constants)
    inputs = [carry, *params.values(), *constants]
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in inputs]
    assert plain > len(inputs)


def test_the_layer_runs_once_forward_and_once_more_backward():
    runs = []

    def counted(*given):
        runs.append(torch.is_grad_enabled())
        return body(*given)

    layer = recompute_layer(counted)
    carry, params, constants = arguments()
    loss = layer(carry, params, constants)[0].sum()
    assert runs == [False]
    loss.backward()
    assert runs == [False, True]
    with torch.no_grad():
        layer(carry, params, constants)
    assert runs == [False, True, False]


def test_the_barrier_gets_copies_of_the_inputs_and_the_gradients():
    """What the barrier puts in place is what the backward pass computes from."""
    carry, params, constants = arguments()
    before = [t.detach().clone() for t in (carry, *params.values(), *constants)]
    calls = []

    def double_the_carry(tensors):
        calls.append([(tuple(t.shape), t.dtype) for t in tensors])
        tensors[0].mul_(2)

    outputs, grads = run(recompute_layer(body, barrier=double_the_carry), carry, params, constants)
    # Inputs in order, then one gradient for the carry and for each output.
    expected = [(tuple(t.shape), t.dtype) for t in before]
    expected += [(tuple(t.shape), t.dtype) for t in outputs]
    assert calls == [expected]
    for tensor, original in zip((carry, *params.values(), *constants), before, strict=True):
        assert torch.equal(tensor, original)
    doubled = (2 * carry.detach()).requires_grad_()
    assert torch.equal(outputs[0], body(carry, params, constants)[0])
    assert not torch.equal(grads[1], run(body, carry, params, constants)[1][1])
    new, (energy, *_) = body(doubled, params, constants)
    cotangents = (torch.linspace(-1, 1, WIDTH).expand_as(new), 2 * outputs[1].detach())
    expected = torch.autograd.grad((new, energy), (doubled, params["up"]), cotangents)
    torch.testing.assert_close(grads[0], expected[0])
    torch.testing.assert_close(grads[1], expected[1])


def test_a_boolean_constant_stays_boolean_behind_the_barrier():
    seen = []

    def masked(carry, params, constants):
        assert constants[0].dtype == torch.bool
        return carry * params["w"].where(constants[0], 0.0), ()

    layer = recompute_layer(masked, barrier=seen.append)
    w = torch.randn(3, requires_grad=True)
    layer(torch.ones(3), {"w": w}, (torch.tensor([True, False, True]),))[0].sum().backward()
    assert w.grad.tolist() == [1, 0, 1] and len(seen) == 1


def test_differentiating_twice_is_refused():
    carry, params, constants = arguments()
    new, _ = recompute_layer(body)(carry, params, constants)
    (grad,) = torch.autograd.grad(new.square().sum(), carry, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiate twice a function .*once_differentiable"):
        grad.sum().backward()


def test_a_recomputed_model_is_copied_and_pickled_whole():
    model = Gemma4ForCausalLM(micro(), Execution(recompute=recompute_layer))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        hook = Mock(return_value=None)
        copied.stack.templates[0].attention.register_forward_hook(hook)
        copied(torch.zeros(1, 4, dtype=torch.int32))
        assert hook.called


def test_the_layer_keeps_its_name_and_words():
    assert recompute_layer(body).__name__ == "body"
    assert recompute_layer(body).__doc__ == body.__doc__


# Policies that keep results


def policy_run(policy):
    """Losses and gradients of a model of 4 local and 2 global layers, and how often its attention
    ran in forward and in all."""
    recompute = None if policy is None else partial(recompute_layer, policy=policy)
    execution = Execution(Precision.uniform(torch.float32), attention="kernel", recompute=recompute)
    model = Gemma4ForCausalLM(micro(), execution)
    init_parameters(model, seed=0)
    ids = torch.arange(32).view(2, 16) % 60
    with patch.object(reference, "attention", wraps=reference.attention) as attention:
        output = model.loss(ids, ids)
        forward = attention.call_count
        output.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return (output, grads), (forward, attention.call_count)


@pytest.mark.parametrize(
    ("policy", "calls"), [("full", 12), ("save_global_attention", 10), ("save_attention", 6)]
)
def test_kept_attention_does_not_run_again_and_no_bit_changes(policy, calls):
    expected, _ = policy_run(None)
    found, counted = policy_run(policy)
    assert counted == (6, calls)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_policy_keeps_what_the_ops_backward_reads_and_nothing_else():
    saved = []
    execution = Execution(
        Precision.uniform(torch.float32),
        attention="kernel",
        recompute=partial(recompute_layer, policy="save_attention"),
    )
    model = Gemma4ForCausalLM(micro(), execution)
    init_parameters(model, seed=0)
    layer = model.stack._bodies[0]
    template = model.stack.templates[0]
    params = {n: torch.randn(p.shape, requires_grad=True) for n, p in template.named_parameters()}
    x = torch.randn(2, 16, 32)
    tables = [torch.randn(16, 1, template.attention.spec.head_dim // 2) for _ in range(4)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x, params, tuple(tables))
    added = [tuple(t.shape) for t in saved[1 + len(params) + len(tables) :]]
    spec, heads = template.attention.spec, micro().num_attention_heads
    assert added == [(2, 16, heads, spec.head_dim), (2, heads, 16)]
