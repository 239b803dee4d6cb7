"""Parameters, FLOPs and bytes against the real module and the published figures."""

import json
from dataclasses import replace
from math import prod

import pytest
import torch

from torch_gemma4.accounting import parameter_table, state_bytes, training_flops
from torch_gemma4.layer_spec import FULL, SLIDING, LayerOverride
from torch_gemma4.model import Gemma4ForCausalLM
from torch_gemma4.presets import gemma4_26b_a4b, micro, tiny_128e, tiny_moe

DENSE = {"enable_moe_block": False, "num_experts": 0, "top_k_experts": 0}
CONFIGS = {
    "26b": gemma4_26b_a4b(),
    "tiny_moe": tiny_moe(),
    "tiny_128e": tiny_128e(),
    "dense": replace(micro(), moe_intermediate_size=0, **DENSE),
    "untied with biases": replace(micro(), tie_word_embeddings=False, attention_bias=True),
    "own values": replace(micro(), attention_k_eq_v=False),
    "uneven": replace(micro(), per_layer=(LayerOverride(layer=1, head_dim=12),)),
    "split experts": replace(micro(), split_expert_weights=True),
    "frozen scalar": replace(micro(), layer_scalar_trainable=False),
}


def rows(config):
    return {row.part: row for row in parameter_table(config)}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parameters_are_those_of_the_module(config):
    with torch.device("meta"):
        model = Gemma4ForCausalLM(config)
    table = rows(config)
    total = table.pop("total")
    assert total.total == sum(tensor.numel() for tensor in model.state_dict().values())
    assert total.total == sum(row.total for row in table.values())
    assert total.active == sum(row.active for row in table.values())
    by_part = {"experts": ".experts.", "routers": ".router.", "attention": ".attention."}
    for part, piece in by_part.items():
        count = sum(t.numel() for name, t in model.state_dict().items() if piece in name)
        assert count == (table[part].total if part in table else 0), part


def test_parameters_of_the_26b_are_the_published_ones(hf_cases):
    table = rows(gemma4_26b_a4b())
    assert table["total"].total == 25_233_141_790
    assert table["total"].active == 3_822_530_590
    assert {part: row.total for part, row in table.items() if part != "total"} == {
        "embedding": 738_197_504,
        "experts": 22_837_985_280,
        "routers": 10_901_760,
        "dense MLPs": 535_265_280,
        "attention": 1_110_197_760,
        "norms": 594_176,
        "layer scalars": 30,
    }
    assert table["experts"].active == table["experts"].total // 16
    keys = hf_cases / "gemma4_26b_keys.json"
    if not keys.exists():
        pytest.skip(f"no {keys}")
    shapes = json.loads(keys.read_text())["tensors"]
    text = [shape for name, shape in shapes.items() if name.startswith("model.language_model.")]
    assert table["total"].total == sum(map(prod, text))


def test_flops_of_the_26b_are_the_published_ones():
    table = training_flops(gemma4_26b_a4b(), sequence_length=16_384, sequences_per_chip=2)
    assert {part.part: round(part.forward / 1e12, 3) for part in table.parts} == {
        "local attention projections": 56.694,
        "global attention projections": 16.063,
        "local attention": 13.314,
        "global attention": 43.980,
        "dense MLPs": 35.079,
        "routers": 0.709,
        "experts": 93.544,
        "head": 48.379,
    }
    assert round(table.training / 1e12, 3) == 923.287
    assert table.training == 3 * table.forward == sum(part.training for part in table.parts)


def flops(config, length=32, sequences=1):
    table = training_flops(config, sequence_length=length, sequences_per_chip=sequences)
    return {part.part: part.forward for part in table.parts}


def test_matmul_flops_are_two_a_token_and_active_weight():
    """The embedding is looked up, and is the head's matrix; vectors take part in no product."""
    for config in (micro(), CONFIGS["own values"], CONFIGS["dense"], CONFIGS["uneven"]):
        products = {k: v for k, v in flops(config).items() if k.split()[-1] != "attention"}
        with torch.device("meta"):
            model = Gemma4ForCausalLM(config)
        weights = 0
        for name, tensor in model.state_dict().items():
            count = 0 if "norm" in name or name.endswith("scale") else tensor.numel()
            if ".experts." in name:
                count = count * config.top_k_experts // config.num_experts
            weights += 0 if name.endswith("layer_scalar") else count
        assert sum(products.values()) == 2 * 32 * weights


@pytest.mark.parametrize("length", [1, 5, 8, 9, 64])
def test_attention_flops_count_the_pairs_of_the_mask(length):
    """The convention takes half a diagonal off, S^2 / 2 pairs of S (S + 1) / 2 exact ones."""
    config = micro()  # window 8
    queries, keys = torch.arange(length)[:, None], torch.arange(length)[None]
    causal = keys <= queries
    layers = {"local": (4, 8, causal & (queries - keys < 8)), "global": (2, 16, causal)}
    for kind, (num_layers, head_dim, mask) in layers.items():
        window = min(length, 8) if kind == "local" else length
        pairs = mask.sum().item() - window / 2
        expected = 4 * pairs * config.num_attention_heads * head_dim * num_layers
        assert flops(config, length)[f"{kind} attention"] == expected


def test_a_window_of_the_sequence_or_more_is_no_window():
    local = replace(micro(), layer_types=(SLIDING,) * 6)
    wide = replace(local, sliding_window=1000)
    exact = replace(local, sliding_window=32)
    full = replace(local, layer_types=(FULL,) * 6, global_head_dim=8, num_global_key_value_heads=2)
    pairs = flops(wide)["local attention"]
    assert pairs == flops(exact)["local attention"] == flops(full)["global attention"]


def test_flops_scale_with_sequences():
    one, three = flops(micro()), flops(micro(), sequences=3)
    assert three == {part: 3 * count for part, count in one.items()}


def test_a_dense_model_has_no_routed_flops():
    assert not {"experts", "routers"} & set(flops(CONFIGS["dense"]))


def test_state_of_the_26b_on_128_chips():
    state = state_bytes(gemma4_26b_a4b(), 128)
    assert state.persistent == pytest.approx(2.37e9, rel=3e-3)
    assert state.gradients == pytest.approx(0.79e9, rel=3e-3)
    assert state.gathered_layer == 828_513_409 * 2  # a global layer, hf-gemma4.md 4
    assert state.gathered_embedding == 738_197_504 * 2


def test_state_keeps_vectors_whole_and_splits_matrices():
    config = micro()
    with torch.device("meta"):
        state = Gemma4ForCausalLM(config).state_dict()
    stacked = {name: len(t.shape) - 2 * name.startswith("stack") for name, t in state.items()}
    vectors = sum(t.numel() for name, t in state.items() if stacked[name] == 1)
    matrices = sum(t.numel() for name, t in state.items() if stacked[name] > 1)
    for chips in (1, 4, 7):
        found = state_bytes(config, chips, parameter_bytes=2)
        assert found.parameters == 2 * (vectors + -(-matrices // chips))
        assert found.moments == 2 * found.parameters == 2 * found.gradients


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: state_bytes(c, 0), "num_chips = 0: give a whole number"),
        (
            lambda c: training_flops(c, sequence_length=0, sequences_per_chip=1),
            "sequence_length = 0: give a whole number",
        ),
        (
            lambda c: training_flops(c, sequence_length=8, sequences_per_chip=0.5),
            "sequences_per_chip = 0.5: give a whole number",
        ),
    ],
)
def test_impossible_workloads_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call(micro())
