from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pallas_ops import split_experts
from torch_gemma4.execution import Execution, Precision
from torch_gemma4.mlp import MLP
from torch_gemma4.moe import Experts
from torch_gemma4.presets import micro

DIM, WIDTH, NUM_EXPERTS = 10, 6, 5


def experts_of(dtype: torch.dtype) -> Experts:
    config = replace(micro(), hidden_size=DIM, moe_intermediate_size=WIDTH, num_experts=NUM_EXPERTS)
    experts = Experts(config, Execution(precision=Precision.uniform(dtype))).to(dtype)
    with torch.no_grad():
        for param in experts.parameters():
            param.normal_()
    return experts


def by_hand(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[t])
        for k, e in enumerate(ids[t].tolist()):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            total = total + weights[t, k] * ((F.gelu(gate, approximate="tanh") * up) @ down[e])
        rows.append(total)
    return torch.stack(rows)


def routed(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, experts 4, 1 and 3 in all patterns (0 and 2 get nothing), weights."""
    x = torch.randn(num_tokens, DIM, dtype=dtype, requires_grad=True)
    ids = torch.tensor([[4, 1], [1, 3], [3, 1], [1, 4], [4, 3]], dtype=torch.int32)
    weights = torch.rand(num_tokens, 2, dtype=dtype, requires_grad=True)
    return x, ids.repeat(num_tokens // 5 + 1, 1)[:num_tokens], weights


def test_experts_equal_the_definition_with_all_gradients() -> None:
    experts = experts_of(torch.float64)
    x, ids, weights = routed(23, torch.float64)
    inputs = [x, weights, experts.gate_up, experts.down]
    ours = experts(x, ids, weights)
    expected = by_hand(x, ids, weights, experts.gate_up, experts.down)
    torch.testing.assert_close(ours, expected)
    direction = torch.randn_like(ours)
    grads = torch.autograd.grad(ours, inputs, direction)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, inputs, direction))
    for grad in grads[2:]:
        assert not grad[[0, 2]].any()


def test_bfloat16_rows_meet_float32_parameters() -> None:
    """The sum over experts is float32 and rounded once; gradients of parameters are float32."""
    experts = experts_of(torch.float32)
    x, ids, weights = routed(23, torch.float32)
    ours = experts(x.bfloat16(), ids, weights)
    assert ours.dtype == torch.bfloat16
    ours.sum().backward()
    assert {param.grad.dtype for param in experts.parameters()} == {torch.float32}
    exact = by_hand(x, ids, weights, experts.gate_up, experts.down)
    assert (ours.float() - exact).norm() < 0.01 * exact.norm()


def test_nothing_is_dropped_when_all_tokens_choose_alike() -> None:
    experts = experts_of(torch.float64)
    x, _, weights = routed(40, torch.float64)
    ids = torch.tensor([[2, 0]], dtype=torch.int32).expand(40, 2).contiguous()
    expected = by_hand(x, ids, weights, experts.gate_up, experts.down)
    torch.testing.assert_close(experts(x, ids, weights), expected)


@pytest.mark.parametrize("shape", [(3, DIM), (2, 3, DIM)])
def test_dense_mlp_equals_the_definition(shape: tuple[int, ...]) -> None:
    mlp = MLP(DIM, WIDTH, Execution()).double()
    with torch.no_grad():
        for param in mlp.parameters():
            param.normal_()
    x = torch.randn(shape, dtype=torch.float64)
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    hidden = F.gelu(x @ gate.T, approximate="tanh") * (x @ up.T)
    torch.testing.assert_close(mlp(x), hidden @ mlp.down_proj.weight.T)


def test_a_plan_for_kernels_changes_nothing() -> None:
    config = replace(micro(), hidden_size=128, moe_intermediate_size=WIDTH, num_experts=NUM_EXPERTS)
    precision = Precision.uniform(torch.bfloat16)
    by_rows = Experts(config, Execution(precision=precision)).bfloat16()
    by_blocks = Experts(config, Execution(precision=precision, dispatch="kernel")).bfloat16()
    with torch.no_grad():
        for param in by_rows.parameters():
            param.normal_(std=0.1)
    by_blocks.load_state_dict(by_rows.state_dict())
    _, ids, weights = routed(23, torch.float32)
    x = torch.randn(23, 128, dtype=torch.bfloat16)
    assert torch.equal(by_blocks(x, ids, weights), by_rows(x, ids, weights))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_experts_in_two_halves_are_the_same_experts(dtype: torch.dtype) -> None:
    config = replace(micro(), hidden_size=DIM, moe_intermediate_size=WIDTH, num_experts=6)
    execution = Execution(precision=Precision.uniform(dtype))
    whole = Experts(config, execution).to(dtype)
    split = Experts(replace(config, split_expert_weights=True), execution).to(dtype)
    with torch.no_grad():
        for name, param in whole.named_parameters():
            param.normal_(std=0.1)
            split.get_parameter(f"{name}_halves").copy_(split_experts(param).flatten(1, 2))
    x, ids, weights = routed(23, dtype)
    results = []
    for experts in (whole, split):
        y = experts(x, ids, weights)
        grads = torch.autograd.grad(y.sum(), [x, weights, *experts.parameters()])
        results.append([y, *(grad.reshape(-1) for grad in grads)])
    torch.testing.assert_close(*results, rtol=0, atol=0)
