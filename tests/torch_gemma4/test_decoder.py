from dataclasses import replace

import pytest
import torch
from torch import Tensor

from torch_gemma4 import (
    Execution,
    Gemma4Config,
    Gemma4ForCausalLM,
    Precision,
    init_parameters,
    recompute_layer,
)
from torch_gemma4.decoder import DecoderLayer
from torch_gemma4.layer_spec import FULL, SLIDING
from torch_gemma4.norm import rms_norm
from torch_gemma4.presets import micro
from torch_gemma4.rope import rope_tables

FLOAT32 = Execution(precision=Precision.uniform(torch.float32))
FLOAT64 = Execution(precision=Precision.uniform(torch.float64))


def randomised(config: Gemma4Config, execution: Execution) -> Gemma4ForCausalLM:
    """Initial values with every neutral 1 and 0 moved."""
    model = Gemma4ForCausalLM(config, execution)
    init_parameters(model, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.add_(0.2 * noise.to(param.dtype))
    return model


def ids_of(batch: int = 2, length: int = 16) -> Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(3))


def layer_by_layer(model: Gemma4ForCausalLM, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The stack as separate layers, each with its own slice of the stacked parameters."""
    config, stack = model.config, model.stack
    x = model.embedding(ids, model.embedding.weight.detach())
    loads = []
    for period in range(config.num_periods):
        for j, segment in enumerate(config.segments):
            for c in range(segment.count):
                layer = DecoderLayer(config, segment.spec, model.execution)
                own = {n: p[period, c] for n, p in stack.segments[j].named_parameters()}
                layer.load_state_dict(own)
                assert config.layers[stack.layer_index(j, period, c)] == segment.spec
                spec = segment.spec
                tables = rope_tables(spec.rope, spec.head_dim, torch.arange(ids.shape[1]), x.dtype)
                x, statistics = layer(x, *tables, None)
                loads += statistics[2:3]
    return rms_norm(x, model.final_norm.weight, config.rms_norm_eps), loads


ALONE = replace(micro(), num_hidden_layers=5, layer_types=(SLIDING, SLIDING, FULL, FULL, SLIDING))


@pytest.mark.parametrize("config", [micro(), ALONE], ids=["periodic", "aperiodic"])
def test_stack_is_its_layers_in_order(config: Gemma4Config) -> None:
    model = randomised(config, FLOAT32)
    hidden, statistics = model(ids_of())
    with torch.no_grad():
        expected, loads = layer_by_layer(model, ids_of())
    assert torch.equal(hidden, expected)
    assert torch.equal(statistics.expert_load, torch.stack(loads))
    assert [tuple(s.shape) for s in statistics] == [
        (config.num_hidden_layers, size) for size in (1, 1, config.num_experts, 1)
    ]


def test_parameters_are_stacked_by_period() -> None:
    shapes = {n: tuple(p.shape) for n, p in Gemma4ForCausalLM(micro()).named_parameters()}
    assert shapes["stack.segments.0.attention.v_proj.weight"] == (2, 2, 16, 32)
    assert shapes["stack.segments.1.attention.k_proj.weight"] == (2, 1, 16, 32)
    assert "stack.segments.1.attention.v_proj.weight" not in shapes
    assert shapes["stack.segments.0.experts.down"] == (2, 2, 4, 32, 32)
    assert shapes["stack.segments.1.layer_scalar"] == (2, 1, 1)


def test_recomputation_changes_no_bit_of_losses_and_gradients() -> None:
    config = replace(micro(), load_balance_loss_weight=0.1, router_z_loss_weight=0.1)
    results, num_calls = [], []
    for recompute in (None, recompute_layer):
        model = randomised(config, replace(FLOAT32, recompute=recompute))
        calls: list[Tensor] = []
        for template in model.stack.templates:
            template.mlp.register_forward_hook(lambda *args, calls=calls: calls.append(args[-1]))
        out = model.loss(ids_of(), ids_of())
        out.loss.backward()
        results.append((out, {n: p.grad for n, p in model.named_parameters()}))
        num_calls.append(len(calls))
    assert num_calls == [6, 12]
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert all(grad.isfinite().all() and grad.any() for grad in results[0][1].values())


def test_layer_scalar_multiplies_the_whole_stream_and_can_be_frozen() -> None:
    config = replace(micro(), layer_scalar_trainable=False)
    model = randomised(config, FLOAT64)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [
        "stack.segments.0.layer_scalar",
        "stack.segments.1.layer_scalar",
    ]
    outs = []
    template = model.stack.templates[1]
    template.register_forward_hook(lambda module, args, out: outs.append(out[0]))
    model(ids_of())
    with torch.no_grad():
        model.stack.segments[1].layer_scalar[1].mul_(0.25)
    model(ids_of())
    assert len(outs) == 4
    torch.testing.assert_close(outs[3], 0.25 * outs[1], rtol=1e-13, atol=0)
    model.loss(ids_of(), ids_of()).loss.backward()
    assert model.stack.segments[0].layer_scalar.grad is None


def test_without_experts_a_layer_is_the_dense_branch_alone() -> None:
    model = randomised(replace(micro(), enable_moe_block=False), FLOAT64)
    (spec, p) = model.config.segments[1].spec, model.stack.segments[1]
    layer = DecoderLayer(model.config, spec, model.execution).double()
    layer.load_state_dict({name: param[0, 0] for name, param in p.named_parameters()})
    x, eps = torch.randn(1, 8, 32, dtype=torch.float64), model.config.rms_norm_eps
    tables = rope_tables(spec.rope, spec.head_dim, torch.arange(8), x.dtype)

    def norm(name: str, x: Tensor) -> Tensor:
        return rms_norm(x, layer.get_parameter(f"{name}.weight"), eps)

    a = layer.attention(norm("input_norm", x), *tables, None)
    r = x + norm("post_attention_norm", a)
    y = r + norm("post_ffw_norm", layer.mlp(norm("pre_mlp_norm", r)))
    out, statistics = layer(x, *tables, None)
    torch.testing.assert_close(out, y * layer.layer_scalar)
    assert statistics == ()
    out = model.loss(ids_of(), ids_of())
    assert out.load_balance_loss is None and out.expert_load is None
    assert not any("router" in name or "experts" in name for name, _ in model.named_parameters())


def test_bfloat16_and_float64_run_with_parameters_of_their_own() -> None:
    for precision in (Precision(), Precision.uniform(torch.float64)):
        model = randomised(micro(), Execution(precision=precision))
        hidden, _ = model(ids_of())
        assert hidden.dtype == precision.compute
        out = model.loss(ids_of(), ids_of())
        out.loss.backward()
        assert out.loss.dtype == torch.promote_types(precision.compute, torch.float32)
        assert {p.grad.dtype for p in model.parameters()} == {precision.params}
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_precision_refuses_what_is_not_a_float() -> None:
    with pytest.raises(ValueError, match=r"compute = torch.int32: give a floating-point"):
        Precision(compute=torch.int32)


def test_constrain_sees_each_layers_entry_and_each_table() -> None:
    seen = []

    def note(tensor: Tensor, name: str) -> Tensor:
        seen.append((name, tuple(tensor.shape)))
        return tensor

    model = randomised(micro(), replace(FLOAT32, constrain=note))
    model.loss(ids_of(), ids_of())
    entries = [(name, shape) for name, shape in seen if name in ("table", "hidden")]
    assert entries == [("table", (64, 32))] + [("hidden", (2, 16, 32))] * 6
