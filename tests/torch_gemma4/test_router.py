from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_gemma4 import Execution, Gemma4ForCausalLM, Precision, init_parameters
from torch_gemma4.norm import rms_norms
from torch_gemma4.presets import micro
from torch_gemma4.router import Router, Routing, router_statistics, top_k


def router_of(dim: int, num_experts: int, k: int) -> Router:
    router = Router(dim, num_experts, k, Execution())
    with torch.no_grad():
        for param in router.parameters():
            param.copy_(
                torch.randn_like(param) * (1 if param.ndim == 2 else 0.2) + (param.ndim == 1)
            )
    return router


def stable(probs: Tensor, k: int) -> Tensor:
    return torch.argsort(probs, dim=-1, descending=True, stable=True)[:, :k].int()


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 4))
def test_top_k_is_a_stable_sort(seed: int, num_experts: int, num_levels: int) -> None:
    """Few distinct values: most are ties. Zeros too, as a softmax may underflow."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randint(0, num_levels, (7, num_experts), generator=generator) / num_levels
    for k in {1, (num_experts + 1) // 2, num_experts}:
        ids = top_k(probs, k)
        assert ids.dtype == torch.int32
        assert torch.equal(ids, stable(probs, k))


def test_top_k_of_skewed_probabilities() -> None:
    logits = torch.randn(200, 128) + torch.linspace(40, -80, 128)
    probs = logits.softmax(-1)
    assert (probs == 0).any()
    assert torch.equal(top_k(probs, 8), stable(probs, 8))
    assert torch.equal(top_k(torch.full((3, 128), 1 / 128), 8), torch.arange(8).expand(3, 8).int())


def test_top_k_of_nan_stays_in_range() -> None:
    probs = torch.full((2, 6), torch.nan)
    assert top_k(probs, 2).tolist() == [[5, 5], [5, 5]]


def test_weights_are_the_definition() -> None:
    router = router_of(16, 12, 3).double()
    z = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    routing = router(z)
    probs = (z @ router.proj.weight.T).softmax(-1)
    picked, ids = probs.topk(3)
    weights = picked / picked.sum(-1, keepdim=True) * router.per_expert_scale[ids]
    assert torch.equal(routing.expert_ids.long(), ids)
    torch.testing.assert_close(routing.weights, weights)
    inputs, direction = [z, *router.parameters()], torch.randn_like(weights)
    ours = torch.autograd.grad(routing.weights, inputs, direction, allow_unused=True)
    expected = torch.autograd.grad(weights, inputs, direction, allow_unused=True)
    torch.testing.assert_close(ours[0], expected[0])
    torch.testing.assert_close(ours[1:], expected[1:], allow_subclasses=True)


def test_float32_picks_the_experts_of_float64() -> None:
    """From one bfloat16 residual. bfloat16 anywhere would move some 3 % of tokens."""
    dim, num_experts, k = 512, 128, 8
    router = router_of(dim, num_experts, k)
    residual = torch.randn(1024, dim).bfloat16()

    def route(dtype: torch.dtype) -> Routing:
        scale = router.input_scale(dtype)
        (z,) = rms_norms(residual.to(torch.promote_types(dtype, torch.float32)), (scale,), 1e-6)
        return router(z.to(dtype))

    exact, ours, rounded = map(route, (torch.float64, torch.float32, torch.bfloat16))
    assert (ours.logits - exact.logits).abs().max() < 1e-6 * exact.logits.abs().max() * 4
    assert torch.equal(ours.expert_ids, exact.expert_ids)
    assert (rounded.expert_ids != exact.expert_ids).any(-1).float().mean() > 0.02


def test_the_models_router_is_float32_in_a_bfloat16_model() -> None:
    model = Gemma4ForCausalLM(micro())
    init_parameters(model)
    seen = []
    for template in model.stack.templates:
        template.router.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    model(torch.arange(16, dtype=torch.int32)[None])
    assert len(seen) == 6
    for z, routing in seen:
        dtypes = {t.dtype for t in (z, routing.logits, routing.probs, routing.weights)}
        assert dtypes == {torch.float32}
        assert (z != z.bfloat16()).float().mean() > 0.9  # never rounded on its way here
        assert torch.allclose(z.square().sum(-1), torch.ones(()), atol=1e-3)  # unit length


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.name().split("::")[1].split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def test_no_sort_gather_or_scatter_forward_or_backward() -> None:
    router = router_of(16, 12, 3)
    with Ops() as ops:
        routing = router(torch.randn(8, 16))
        statistics = router_statistics(routing, 2)
        (routing.weights.sum() + statistics.load_balance + statistics.router_z).sum().backward()
    serial = {"topk", "sort", "gather", "scatter", "scatter_add", "index", "index_put", "index_add"}
    assert not serial & set(ops.names)
    assert not {"index_select", "bincount", "nonzero", "_local_scalar_dense"} & set(ops.names)


def routing_of(logits: Tensor, k: int) -> Routing:
    ids = top_k(logits.softmax(-1), k)
    chosen = ids[..., None] == torch.arange(logits.shape[-1])
    return Routing(logits, logits.softmax(-1), ids, torch.ones(ids.shape), chosen)


def test_losses_are_their_formulas() -> None:
    batch, length, num_experts, k = 3, 20, 6, 2
    logits = torch.randn(batch * length, num_experts, dtype=torch.float64)
    statistics = router_statistics(routing_of(logits, k), batch)
    total = 0.0
    for row in logits.view(batch, length, num_experts):
        probs = row.softmax(-1)
        ids = probs.topk(k).indices.flatten().tolist()
        density = torch.tensor([ids.count(e) for e in range(num_experts)]) / (length * k)
        total += (density * probs.mean(0)).sum() * num_experts / batch
    assert statistics.load_balance.item() == pytest.approx(float(total), rel=1e-6)
    z = logits.exp().sum(-1).log().square().mean()
    assert statistics.router_z.item() == pytest.approx(z.item(), rel=1e-12)
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert statistics.router_entropy.item() == pytest.approx(entropy.item(), rel=1e-12)
    ids = logits.topk(k).indices.flatten()
    assert torch.equal(statistics.expert_load, torch.bincount(ids, minlength=num_experts).float())


def test_load_balance_is_1_for_uniform_and_e_for_collapsed_routing() -> None:
    # Token t prefers expert t: every expert gets as many tokens, and as much probability.
    uniform = router_statistics(routing_of(torch.eye(8).repeat(2, 1), 1), 2)
    assert uniform.load_balance.item() == pytest.approx(1, rel=1e-6)
    collapsed = router_statistics(routing_of(torch.eye(8)[[3] * 16] * 100, 1), 2)
    assert collapsed.load_balance.item() == pytest.approx(8, rel=1e-6)
    assert collapsed.expert_load.tolist() == [0, 0, 0, 16, 0, 0, 0, 0]


@pytest.mark.parametrize("field", ["load_balance_loss_weight", "router_z_loss_weight"])
def test_router_losses_reach_the_router_and_zero_weight_leaves_them_out(field: str) -> None:
    def run(weight: float) -> tuple[Tensor, Tensor, Tensor]:
        execution = Execution(precision=Precision.uniform(torch.float64))
        model = Gemma4ForCausalLM(replace(micro(), **{field: weight}), execution)
        init_parameters(model)
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
        out = model.loss(ids, ids)
        out.loss.backward()
        name = "load_balance_loss" if field.startswith("load") else "router_z_loss"
        grad = model.get_parameter("stack.segments.0.router.proj.weight").grad
        return out.loss - out.cross_entropy, getattr(out, name), grad

    off, value, grad_off = run(0.0)
    on, same_value, grad_on = run(0.25)
    assert off == 0 and value > 0 and same_value == value
    assert on.item() == pytest.approx(0.25 * value.item(), rel=1e-12)
    assert (grad_on - grad_off).abs().amax((-1, -2)).min() > 1e-6  # in every layer
