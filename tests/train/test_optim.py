"""AdamW and clipping against torch.optim and closed forms."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from torch_gemma4.execution import Execution, Precision
from torch_gemma4.model import Gemma4ForCausalLM
from torch_gemma4.presets import micro
from train.build import decays
from train.config import OptimConfig
from train.optim import AdamW, clip_by_global_norm
from train.schedule import learning_rate

SHAPES = {"proj.weight": (5, 7), "norm.weight": (2, 3, 7), "layer_scalar": (2, 3, 1)}


def parameters(dtype=torch.float32):
    return {n: nn.Parameter(torch.randn(shape).to(dtype)) for n, shape in SHAPES.items()}


# Clipping


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_equals_torchs(max_norm):
    tensors = list(parameters().values())
    for tensor in tensors:
        tensor.grad = torch.randn_like(tensor)
    ours = [tensor.grad.clone() for tensor in tensors]
    norm = clip_by_global_norm(ours, max_norm)
    expected = nn.utils.clip_grad_norm_(tensors, max_norm)
    torch.testing.assert_close(norm, expected)
    for found, tensor in zip(ours, tensors, strict=True):
        torch.testing.assert_close(found, tensor.grad, rtol=3e-6, atol=0)


def test_bfloat16_gradients_are_squared_in_float32():
    value = 1 + 2**-7  # whose square bfloat16 does not hold
    norm = clip_by_global_norm([torch.full((4,), value, dtype=torch.bfloat16)], 1e9)
    torch.testing.assert_close(norm, torch.tensor(2 * value), rtol=1e-6, atol=0)


def test_a_norm_within_bounds_changes_no_bit():
    grad = torch.randn(100)
    clipped = grad.clone()
    clip_by_global_norm([clipped], 1e3)
    assert torch.equal(clipped, grad)


def test_bf16_gradients_have_their_norm_in_float32():
    """4096 ones: a bf16 sum of squares stops growing at 256."""
    grads = [torch.ones(2048, dtype=torch.bfloat16) for _ in range(2)]
    norm = clip_by_global_norm(grads, 16.0)
    assert norm.dtype == torch.float32 and norm == 64
    assert all(
        g.dtype == torch.bfloat16 and torch.equal(g, torch.full_like(g, 0.25)) for g in grads
    )


def test_bf16_gradients_are_rounded_once():
    grad = torch.randn(1000).bfloat16()
    clipped = grad.clone()
    norm = clip_by_global_norm([clipped], 3.0)
    assert torch.equal(clipped, (grad.float() * (3.0 / norm)).bfloat16())


def test_zero_gradients_stay_zero():
    grads = [torch.zeros(3), torch.zeros(2, 2)]
    assert clip_by_global_norm(grads, 1.0) == 0
    assert not any(grad.any() for grad in grads)


# AdamW


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_equals_torchs_over_ten_steps(weight_decay):
    config = OptimConfig(learning_rate=3e-2, warmup_steps=3, weight_decay=weight_decay)
    ours = parameters()
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in ours.items()}
    optimizer = AdamW(ours, config, 10, decays=lambda name: name == "proj.weight")
    reference = torch.optim.AdamW(
        [
            {"params": [theirs["proj.weight"]], "weight_decay": weight_decay},
            {"params": [theirs["norm.weight"], theirs["layer_scalar"]], "weight_decay": 0.0},
        ],
        betas=config.betas,
        eps=config.eps,
    )
    for step in range(1, 11):
        for name, parameter in ours.items():
            parameter.grad = torch.randn_like(parameter) * 10 ** (step % 3)
            theirs[name].grad = parameter.grad.clone()
        for group in reference.param_groups:
            group["lr"] = learning_rate(torch.tensor(step), config, 10).item()
        rate = optimizer.step()
        reference.step()
        assert rate == torch.tensor(group["lr"]) and optimizer.num_updates == step
        for name, parameter in ours.items():
            torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-6)
            state = reference.state[theirs[name]]
            torch.testing.assert_close(optimizer.moments["exp_avg"][name], state["exp_avg"])
            torch.testing.assert_close(optimizer.moments["exp_avg_sq"][name], state["exp_avg_sq"])


def test_decay_shrinks_what_decays_and_nothing_else():
    config = OptimConfig(learning_rate=0.5, schedule="constant", warmup_steps=0, weight_decay=0.1)
    ours = parameters()
    before = {name: p.detach().clone() for name, p in ours.items()}
    for parameter in ours.values():
        parameter.grad = torch.zeros_like(parameter)
    AdamW(ours, config, 10, decays=lambda name: name == "proj.weight").step()
    torch.testing.assert_close(ours["proj.weight"].detach(), before["proj.weight"] * 0.95)
    for name in ("norm.weight", "layer_scalar"):
        assert torch.equal(ours[name], before[name])


def test_moments_are_float32_for_bf16_parameters_and_gradients():
    config = OptimConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant")
    low = parameters(torch.bfloat16)
    high = {name: nn.Parameter(p.detach().float()) for name, p in low.items()}
    optimizers = [AdamW(p, config, 9, decays=lambda name: True) for p in (low, high)]
    for name in SHAPES:
        low[name].grad = torch.randn(SHAPES[name]).bfloat16()
        high[name].grad = low[name].grad.float()
    for optimizer in optimizers:
        optimizer.step()
    for name in SHAPES:
        for state in (optimizers[0].moments["exp_avg"], optimizers[0].moments["exp_avg_sq"]):
            assert state[name].dtype == torch.float32
        assert torch.equal(
            optimizers[0].moments["exp_avg"][name], optimizers[1].moments["exp_avg"][name]
        )
        assert low[name].dtype == torch.bfloat16
        torch.testing.assert_close(low[name].float(), high[name], rtol=2**-8, atol=1e-6)


def test_moments_are_made_by_the_caller_where_asked():
    made = []

    def zeros(name, like):
        made.append((name, tuple(like.shape)))
        return torch.zeros_like(like)

    AdamW(parameters(), OptimConfig(), 9, decays=lambda name: True, zeros_like=zeros)
    assert sorted(made) == sorted(2 * [*SHAPES.items()])


def test_a_frozen_layer_scalar_is_left_alone():
    config = replace(micro(), layer_scalar_trainable=False)
    model = Gemma4ForCausalLM(config, Execution(precision=Precision.uniform(torch.float32)))
    named = dict(model.named_parameters())
    for parameter in named.values():
        nn.init.constant_(parameter, 0.5)
    optimizer = AdamW(named, OptimConfig(warmup_steps=0), 9, decays=decays)
    scalars = [name for name in named if name.endswith("layer_scalar")]
    assert len(scalars) == 2 and set(named) - set(optimizer.parameters) == set(scalars)
    ids = torch.arange(16)[None] % 7
    model.loss(ids, ids).loss.backward()
    optimizer.step()
    assert all(bool((named[name] == 0.5).all()) and named[name].grad is None for name in scalars)
    assert not any(bool((p == 0.5).all()) for n, p in named.items() if n.endswith("proj.weight"))


def test_a_missing_gradient_is_named():
    ours = parameters()
    optimizer = AdamW(ours, OptimConfig(), 9, decays=lambda name: True)
    ours["proj.weight"].grad = torch.zeros(5, 7)
    before = ours["proj.weight"].detach().clone()
    message = r"no gradient for 2 of 3 parameters: norm.weight, layer_scalar; call backward\(\)"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(ours["proj.weight"], before) and optimizer.num_updates == 0
    for parameter in ours.values():
        parameter.grad = torch.zeros_like(parameter)
    assert list(optimizer.gradients()) == list(SHAPES)


def test_nothing_to_train_is_refused():
    frozen = {name: p.requires_grad_(False) for name, p in parameters().items()}
    with pytest.raises(ValueError, match="none of 3 parameters requires grad"):
        AdamW(frozen, OptimConfig(), 9, decays=lambda name: True)
