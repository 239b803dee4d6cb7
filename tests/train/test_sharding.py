"""The table of sharding rules: one rule a parameter, layouts, fallbacks, bytes and refusals."""

from dataclasses import replace
from math import prod

import pytest
import torch

from torch_gemma4 import presets as models
from torch_gemma4.accounting import state_bytes
from torch_gemma4.hf_names import hf_to_ours
from torch_gemma4.model import Gemma4ForCausalLM
from train import sharding
from train.build import decays
from train.config import MeshConfig
from train.sharding import (
    RULES,
    Rule,
    expert_weight_dim,
    parameter_spec,
    rule_of,
    sharding_table,
)

MODELS = {
    "26b": models.gemma4_26b_a4b(),
    "tiny_moe": models.tiny_moe(),
    "tiny_128e": models.tiny_128e(),
    "micro": models.micro(),
    "biases": replace(models.micro(), attention_bias=True),
    "untied": replace(models.micro(), tie_word_embeddings=False),
    "own values": replace(models.micro(), attention_k_eq_v=False),
    "split experts": replace(models.micro(), split_expert_weights=True),
    "dense": replace(models.micro(), enable_moe_block=False),
}
every_model = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)


def shapes_of(config):
    with torch.device("meta"):
        model = Gemma4ForCausalLM(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def matrices_of(config):
    """Names of parameters that are matrices in one layer, by the checkpoint's own shapes."""
    return {slot.parameter for slot in hf_to_ours(config).values() if len(slot.shape) > 1}


@every_model
def test_every_parameter_matches_exactly_one_rule(config):
    for name in shapes_of(config):
        assert rule_of(name) in RULES


def test_every_rule_is_used():
    used = {rule_of(name) for config in MODELS.values() for name in shapes_of(config)}
    assert used == set(RULES)


@every_model
def test_matrices_are_split_once_and_the_rest_is_replicated(config):
    matrices = matrices_of(config)
    for row in sharding_table(config, MeshConfig(fsdp=4)):
        expected = ["fsdp"] if row.parameter in matrices else []
        assert [axis for axis in row.spec if axis] == expected, row.parameter
        assert len(row.spec) == len(row.shape)
        divisor = 4 if expected else 1
        assert row.bytes_per_chip == 4 * prod(row.shape) // divisor
        assert all(size % 4 == 0 for size, axis in zip(row.shape, row.spec, strict=True) if axis)


@every_model
def test_decay_is_for_matrices_exactly(config):
    matrices = matrices_of(config)
    assert {name for name in shapes_of(config) if decays(name)} == matrices


def test_26b_on_128_chips():
    config = MODELS["26b"]
    rows = {
        row.parameter: row for row in sharding_table(config, MeshConfig(fsdp=128, platform="tpu"))
    }
    assert rows["embedding.weight"].spec == ("fsdp", None)
    assert rows["embedding.weight"].shape == (262_144, 2816)
    assert rows["stack.segments.0.experts.gate_up"].spec == (None, None, "fsdp", None, None)
    assert rows["stack.segments.0.experts.gate_up"].shape == (5, 5, 128, 1408, 2816)
    assert rows["stack.segments.0.mlp.gate_up_proj.weight"].spec == (None, None, None, "fsdp")
    parameters = sum(row.bytes_per_chip for row in rows.values())
    state = state_bytes(config, 128)
    assert parameters == state.parameters
    # 25.23 B parameters of 4 bytes, thrice (two moments), over 128 chips; 1-D ones on each.
    assert 3 * parameters == state.persistent
    assert 3 * parameters / 1e9 == pytest.approx(2.37, abs=0.005)


def test_experts_in_two_halves_lie_as_whole_ones_do():
    config = replace(MODELS["26b"], split_expert_weights=True)
    tables = (
        sharding_table(c, MeshConfig(fsdp=128, platform="tpu")) for c in (MODELS["26b"], config)
    )
    whole, split = ({row.parameter: row for row in table} for table in tables)
    gate_up = split["stack.segments.0.experts.gate_up_halves"]
    assert gate_up.shape == (5, 5, 2, 128 * 704, 2816)
    assert gate_up.spec == (None, None, None, "fsdp", None)
    assert split["stack.segments.0.experts.down_halves"].shape == (5, 5, 2, 128 * 352, 2816)
    bytes_of = {name.removesuffix("_halves"): row.bytes_per_chip for name, row in split.items()}
    assert bytes_of == {name: row.bytes_per_chip for name, row in whole.items()}
    assert expert_weight_dim(config, 128) == 0
    message = (
        "mesh.fsdp = 256 does not divide model.num_experts = 128, which "
        "model.split_expert_weights needs: choose mesh.fsdp that does, or turn that off"
    )
    with pytest.raises(ValueError, match=message):
        expert_weight_dim(config, 256)


def test_replicas_on_the_data_axis_do_not_change_a_chips_bytes():
    alone, replicated = (
        sharding_table(MODELS["micro"], MeshConfig(fsdp=4, data=data)) for data in (1, 2)
    )
    assert alone == replicated


@pytest.mark.parametrize(
    ("num_shards", "gate_up", "dim"),
    [
        (4, (None, None, "fsdp", None, None), 0),
        (8, (None, None, None, None, "fsdp"), 2),  # 4 experts: columns of D = 32 instead
        (1, (None, None, "fsdp", None, None), 0),
    ],
)
def test_experts_fall_back_to_columns_where_the_mesh_does_not_divide_them(num_shards, gate_up, dim):
    config = MODELS["micro"]
    rows = {r.parameter: r for r in sharding_table(config, MeshConfig(fsdp=num_shards))}
    assert rows["stack.segments.0.experts.gate_up"].spec == gate_up
    assert rows["stack.segments.0.experts.down"].spec == gate_up
    assert expert_weight_dim(config, num_shards) == dim


def test_a_parameter_alone_and_stacked_lie_alike():
    assert parameter_spec("experts.down", (8, 16, 32), 4) == ("fsdp", None, None)
    stacked = parameter_spec("stack.segments.0.experts.down", (2, 3, 8, 16, 32), 4)
    assert stacked == (None, None, "fsdp", None, None)


def test_an_indivisible_parameter_is_refused_by_name():
    message = (
        r"parameter 'stack.segments.0.attention.q_proj.weight' of shape \[2, 2, 32, 32\]: "
        r"mesh.fsdp = 5 divides none of the dimensions its rule may split \(sizes 32, 32\); "
        r"choose mesh.fsdp that divides one, or another model width"
    )
    with pytest.raises(ValueError, match=message):
        parameter_spec("stack.segments.0.attention.q_proj.weight", (2, 2, 32, 32), 5)
    with pytest.raises(ValueError, match=r"'embedding.weight' of shape \[64, 32\]: mesh.fsdp = 3"):
        sharding_table(MODELS["micro"], MeshConfig(fsdp=3))
    with pytest.raises(ValueError, match=r"'experts.down' of shape \[4, 32, 32\]: mesh.fsdp = 3"):
        expert_weight_dim(MODELS["micro"], 3)


def test_a_parameter_without_a_rule_is_refused():
    with pytest.raises(ValueError, match=r"'stack.sinks' must match exactly .* matches none: add"):
        rule_of("stack.sinks")


def test_a_parameter_with_two_rules_is_refused(monkeypatch):
    again = Rule("*scalar", (), "a second opinion")
    monkeypatch.setattr(sharding, "RULES", (*RULES, again))
    with pytest.raises(ValueError, match=r"matches '\*layer_scalar', '\*scalar': add or narrow a"):
        rule_of("stack.segments.0.layer_scalar")
