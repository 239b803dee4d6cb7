"""Muon against a plain reference, matrix by matrix, and the singular value decomposition."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from torch_gemma4.config import Gemma4Config
from torch_gemma4.execution import Execution, Precision
from torch_gemma4.init import init_parameters
from torch_gemma4.model import Gemma4ForCausalLM
from torch_gemma4.presets import micro
from train.build import decays
from train.config import OptimConfig
from train.muon import Muon, orthogonal
from train.optim import AdamW
from train.schedule import learning_rate
from train.sharding import RULES, is_hidden_matrix

FLOAT32 = Execution(precision=Precision.uniform(torch.float32))


@pytest.mark.parametrize("shape", [(3, 16, 24), (2, 2, 24, 16), (8, 8), (1, 5)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_singular_values_become_about_one_and_directions_stay(shape, scale):
    x = torch.randn(shape, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    # Of singular values at least 0.05 of the Frobenius norm, far within what five turns can do.
    x = (u * s.clamp(min=0.2 * float(s.max()))[..., None, :]) @ vh * scale
    found = u.mT @ orthogonal(x) @ vh.mT
    values = found.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.65 and values.max() < 1.25
    torch.testing.assert_close(found, torch.diag_embed(values), rtol=0, atol=1e-9)


def test_bfloat16_is_near_and_zeros_stay():
    x = torch.randn(4, 16, 32)
    exact, low = orthogonal(x), orthogonal(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert (low.float() - exact).norm() < 0.05 * exact.norm()
    assert torch.equal(orthogonal(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5))


def test_layouts_are_stated_at_every_turn():
    seen = []
    orthogonal(torch.randn(2, 3, 5), lambda x: seen.append(tuple(x.shape)) or x)
    assert seen == 5 * [(2, 3, 5)]


def reference_step(matrix, grad, momentum, rate, weight_decay):
    """One matrix, as the papers write it."""
    momentum.mul_(0.95).add_(grad)
    x = grad + 0.95 * momentum
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    x = x.T if tall else x
    matrix -= rate * (0.2 * max(matrix.shape) ** 0.5 * x + weight_decay * matrix)


SHAPES = {
    "stack.segments.0.attention.q_proj.weight": (2, 1, 12, 8),
    "stack.segments.0.mlp.gate_up_proj.weight": (2, 1, 10, 8),
    "stack.segments.0.experts.gate_up": (2, 1, 3, 12, 8),
    "stack.segments.0.experts.down": (2, 1, 3, 6, 8),
}


def matrices_of(name, stacked):
    """Every single matrix of a parameter, as views."""
    for matrix in stacked.flatten(0, -3):
        yield from matrix.chunk(2) if "gate_up" in name else (matrix,)


def test_three_steps_equal_the_reference_on_every_matrix():
    config = OptimConfig(name="muon", learning_rate=0.1, warmup_steps=2)
    ours = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    theirs = {name: p.detach().clone() for name, p in ours.items()}
    momenta = {name: torch.zeros_like(p) for name, p in theirs.items()}
    optimizer = Muon(ours, config, 10, decays=decays, dtype=torch.float32)
    for step in (1, 2, 3):
        rate = learning_rate(torch.tensor(step), config, 10).item()
        for name, parameter in ours.items():
            parameter.grad = torch.randn_like(parameter)
            trios = (matrices_of(name, t) for t in (theirs[name], parameter.grad, momenta[name]))
            for matrix, grad, momentum in zip(*trios, strict=True):
                reference_step(matrix, grad, momentum, rate, config.weight_decay)
        optimizer.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter.detach(), theirs[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(optimizer.moments["momentum"][name], momenta[name])


def tiny(config: Gemma4Config) -> Gemma4ForCausalLM:
    model = Gemma4ForCausalLM(config, FLOAT32)
    init_parameters(model, seed=0)
    return model


def test_all_else_is_adamw_to_the_bit():
    config = OptimConfig(name="muon", warmup_steps=0)
    ids = torch.arange(32).view(2, 16) % 60
    trained = []
    for optimizer in (Muon, AdamW):
        model = tiny(micro())
        parameters = dict(model.named_parameters())
        model.loss(ids, ids).loss.backward()
        optimizer(parameters, config, 9, decays=decays).step()
        trained.append({name: p.detach() for name, p in parameters.items()})
    differ = {name for name, p in trained[0].items() if not torch.equal(p, trained[1][name])}
    assert differ == {name for name in trained[0] if is_hidden_matrix(name)}
    left = {name for name in trained[0] if decays(name)} - differ
    assert {name.rpartition(".weight")[0].split(".")[-2:][-1] for name in left} == {
        "embedding", "proj",
    }  # fmt: skip


def test_state_is_one_moment_a_matrix_and_two_for_all_else():
    parameters = dict(tiny(micro()).named_parameters())
    config = OptimConfig(name="muon")
    optimizer = Muon(parameters, config, 9, decays=decays)
    for name, parameter in parameters.items():
        kinds = {kind for kind, tensors in optimizer.moments.items() if name in tensors}
        assert kinds == ({"momentum"} if is_hidden_matrix(name) else {"exp_avg", "exp_avg_sq"})
        assert len(kinds) == config.num_moments(name)
        for kind in kinds:
            moment = optimizer.state()[f"{kind}/{name}"]
            assert moment.dtype == torch.float32 and moment.shape == parameter.shape
    assert {OptimConfig().num_moments(name) for name in parameters} == {2}


def test_hidden_matrices_are_among_those_with_a_sharding_rule_of_their_own():
    hidden = {rule.pattern for rule in RULES if is_hidden_matrix(rule.pattern.replace("*", "x."))}
    assert all(rule.dims for rule in RULES if rule.pattern in hidden)
    assert "*experts.down" in hidden and "*router.proj.weight" not in hidden


def test_a_refused_update_changes_no_bit():
    model = tiny(micro())
    parameters = dict(model.named_parameters())
    optimizer = Muon(parameters, OptimConfig(name="muon", warmup_steps=0), 9, decays=decays)
    ids = torch.arange(16)[None] % 7
    model.loss(ids, ids).loss.backward()
    for parameter in parameters.values():
        parameter.grad.fill_(torch.nan)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer.step(torch.tensor(False))
    assert all(torch.equal(p, before[name]) for name, p in parameters.items())
    assert not any(
        moment.any() for moments in optimizer.moments.values() for moment in moments.values()
    )


def test_a_dense_model_with_an_untied_head_trains():
    config = replace(micro(), enable_moe_block=False, tie_word_embeddings=False)
    model = tiny(config)
    optimizer = Muon(
        dict(model.named_parameters()),
        OptimConfig(name="muon", learning_rate=0.01, warmup_steps=0, schedule="constant"),
        9,
        decays=decays,
    )
    assert "lm_head.weight" in optimizer.moments["exp_avg"]
    ids = torch.arange(32).view(2, 16) % 13
    losses = []
    for _ in range(8):
        loss = model.loss(ids, ids).loss
        loss.backward()
        optimizer.step()
        model.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 1
