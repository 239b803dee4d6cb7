import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from torch_gemma4 import Execution, Gemma4Config, Gemma4ForCausalLM, Precision, init_parameters
from torch_gemma4.init import initial_values
from torch_gemma4.layer_spec import FULL, SLIDING
from torch_gemma4.presets import gemma4_26b_a4b, micro, tiny_moe
from torch_gemma4.rope import apply_rope, rope_tables

FLOAT32 = Execution(precision=Precision.uniform(torch.float32))


def model_of(config: Gemma4Config, execution: Execution = FLOAT32, seed: int = 0):
    model = Gemma4ForCausalLM(config, execution)
    init_parameters(model, seed)
    return model


def test_deterministic_in_the_seed_alone() -> None:
    first, again, other = (dict(model_of(micro(), seed=s).named_parameters()) for s in (5, 5, 6))
    torch.manual_seed(123)
    for name, param in first.items():
        assert torch.equal(param, again[name])
        drawn = bool(param.std(correction=0) > 0)
        assert torch.equal(param, other[name]) != drawn, name


def test_dtype_only_rounds() -> None:
    single = dict(model_of(micro()).named_parameters())
    rounded = model_of(micro(), Execution(precision=Precision.uniform(torch.bfloat16)))
    for name, param in rounded.named_parameters():
        assert torch.equal(param, single[name].bfloat16())


def test_values_do_not_depend_on_stacking() -> None:
    """Three layers stacked [3, 1] against the first three of [1, 3] beside a fourth."""
    alike = replace(micro(), num_hidden_layers=3, layer_types=(SLIDING,) * 3)
    mixed = replace(micro(), num_hidden_layers=4, layer_types=(SLIDING,) * 3 + (FULL,))
    first, second = model_of(alike).stack.segments[0], model_of(mixed).stack.segments[0]
    for name, param in first.named_parameters():
        other = second.get_parameter(name)
        assert param.shape[:2] == (3, 1) and other.shape[:2] == (1, 3)
        assert torch.equal(param[:, 0], other[0])


def test_values_do_not_depend_on_the_split_of_experts() -> None:
    whole = model_of(micro())
    split = model_of(replace(micro(), split_expert_weights=True))
    parameters = {n.removesuffix("_halves"): p for n, p in split.named_parameters()}
    assert parameters["stack.segments.0.experts.gate_up"].shape == (2, 2, 2, 4 * 32, 32)
    for name, param in whole.named_parameters():
        assert torch.equal(parameters[name].reshape(param.shape), param), name


def test_every_layer_and_every_matrix_differs() -> None:
    values: list[Tensor] = [v for _, _, v in initial_values(model_of(micro())) if v.ndim > 1]
    first = [round(v.flatten()[0].item(), 9) for v in values]
    assert len(set(first)) == len(first) > 40


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("embedding.weight", 128**-0.5),
        ("stack.segments.0.attention.q_proj.weight", 128**-0.5),
        ("stack.segments.1.attention.o_proj.weight", 256**-0.5),
        ("stack.segments.0.mlp.gate_up_proj.weight", 128**-0.5),
        ("stack.segments.0.experts.gate_up", 128**-0.5),
        ("stack.segments.0.experts.down", 64**-0.5),
        ("stack.segments.0.router.proj.weight", 128**-0.5),
    ],
)
def test_deviations_of_the_table(name: str, deviation: float) -> None:
    param = model_of(tiny_moe()).get_parameter(name)
    assert param.std().item() == pytest.approx(deviation, rel=0.03)
    assert abs(param.mean().item()) < 4 * deviation / param.numel() ** 0.5


def test_constants_of_the_table() -> None:
    config = replace(micro(), attention_bias=True)
    for name, _, value in initial_values(model_of(config)):
        if value.ndim == 1:
            is_head_norm = name.endswith(("q_norm.weight", "k_norm.weight"))
            constant = len(value) ** -0.25 if is_head_norm else 0.0 if "bias" in name else 1.0
            assert torch.equal(value, torch.full_like(value, constant)), name


def test_meta_parameters_have_no_place_but_have_values() -> None:
    with torch.device("meta"):
        model = Gemma4ForCausalLM(micro(), FLOAT32)
    with pytest.raises(
        ValueError, match=r"embedding.weight: on the meta device; call model.to_empty"
    ):
        init_parameters(model)
    ours = model_of(micro())
    with torch.device("meta"):  # an ambient default device does not move the values
        for name, index, value in initial_values(model):
            assert value.device.type == "cpu"
            assert torch.equal(value, ours.get_parameter(name)[index])


def batch_of(config: Gemma4Config, length: int = 128) -> Tensor:
    return torch.randint(0, config.vocab_size, (4, length))


def test_first_loss_is_ln_v_and_a_half() -> None:
    config = tiny_moe()
    ids = batch_of(config)
    expected = math.log(config.vocab_size) + 0.5
    losses = [model_of(config, seed=s).loss(ids, ids).loss.item() for s in range(3)]
    assert sum(losses) / 3 == pytest.approx(expected, abs=0.1)


def test_first_loss_at_the_real_vocabulary() -> None:
    """The head alone, at V = 262,144: final states of unit RMS meet the initial table."""
    dim, num_rows = 16, gemma4_26b_a4b().vocab_size
    table = torch.randn(num_rows, dim) * dim**-0.5
    hidden = torch.randn(64, dim)
    hidden = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
    logits = 30 * torch.tanh(hidden @ table.T / 30)
    loss = torch.nn.functional.cross_entropy(logits, torch.randint(0, num_rows, (64,)))
    assert math.log(num_rows) + 0.5 == pytest.approx(12.977, abs=1e-3)
    assert loss.item() == pytest.approx(12.977, abs=0.3)  # 64 labels of deviation 1
    assert logits.logsumexp(-1).mean().item() == pytest.approx(12.977, abs=0.01)


def normalised_entropy(model: Gemma4ForCausalLM, ids: Tensor) -> Tensor:
    """Mean over layers, heads and queries i >= 32 of entropy / ln(visible keys)."""
    values = []
    for template in model.stack.templates:
        spec, seen = template.attention.spec, {}
        for part in ("q_norm", "k_proj"):
            module = getattr(template.attention, part)
            module.register_forward_hook(
                lambda m, a, out, part=part, seen=seen: seen.update({part: out})
            )

        def measure(module, args, out, spec=spec, seen=seen):
            # k_norm's own weight is a slice while the layer runs; all layers start with one value.
            weight = module.k_norm.weight
            k = seen["k_proj"].unflatten(-1, (-1, spec.head_dim)).float()
            k = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
            length = k.shape[1]
            tables = rope_tables(spec.rope, spec.head_dim, torch.arange(length), k.dtype)
            q, k = apply_rope(seen["q_norm"], *tables), apply_rope(k, *tables)
            k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
            scores = torch.einsum("bsnh,btnh->bnst", q, k)
            distance = torch.arange(length)[:, None] - torch.arange(length)
            mask = (distance >= 0) & (distance < (spec.window or length))
            probs = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            entropy = torch.special.entr(probs).sum(-1) / mask.sum(-1).log()
            values.append(entropy[..., 32:].mean())

        template.attention.register_forward_hook(measure)
    with torch.no_grad():
        model(ids)
    assert len(values) == model.config.num_hidden_layers
    return torch.stack(values)


def test_attention_starts_spread_out() -> None:
    """And would start nearly one-hot with the neutral norm of 1."""
    config = replace(tiny_moe(), head_dim=256, global_head_dim=512)
    model, ids = model_of(config), batch_of(config, 96)
    assert normalised_entropy(model, ids).min() > 0.8
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                param.fill_(1.0)
    assert normalised_entropy(model, ids).mean() < 0.3


def test_experts_start_evenly_loaded_and_the_router_undecided() -> None:
    config = tiny_moe()
    out = model_of(config).loss(batch_of(config), batch_of(config))
    share = out.expert_load / out.expert_load.mean(-1, keepdim=True)
    assert share[0].max() < 1.5
    # Deeper streams share directions; 4 would be all tokens on one expert.
    assert share.max() < 3 and out.expert_load.min() > 0
    assert out.router_entropy.min() > 0.98 * math.log(config.num_experts)
    assert out.load_balance_loss.item() == pytest.approx(1, abs=0.05)
