"""The presets are what they say, and the 26B is the published model."""

from dataclasses import replace

import pytest

from torch_gemma4 import presets
from torch_gemma4.accounting import parameter_table
from torch_gemma4.config import Gemma4Config
from torch_gemma4.layer_spec import FULL, SLIDING

ALL = [presets.gemma4_26b_a4b, presets.tiny_moe, presets.tiny_128e, presets.micro]

# text_config of google/gemma-4-26B-A4B, as public copies of the file agree (hf-gemma4.md 1).
PUBLISHED_26B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": True,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": True,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02,
    "intermediate_size": 2112,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": 8,
    "use_bidirectional_attention": "vision",
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}


def test_the_26b_is_the_published_config():
    data = {"model_type": "gemma4", "text_config": PUBLISHED_26B, "tie_word_embeddings": True}
    assert Gemma4Config.from_hf(data) == presets.gemma4_26b_a4b()


@pytest.mark.parametrize("preset", ALL)
def test_every_preset_has_both_kinds_of_layer_in_a_period(preset):
    config = preset()
    kinds = [segment.spec.kind for segment in config.segments]
    assert kinds == [SLIDING, FULL]
    assert config == replace(config)


def test_tiny_moe_suits_bytes_and_meshes_of_four_and_eight():
    config = presets.tiny_moe()
    assert config.vocab_size == 256
    assert config.num_experts % 8 == 0 and config.moe_intermediate_size % 32 == 0
    assert [segment.count for segment in config.segments] == [5, 1]
    assert 1_000_000 < parameter_table(config)[-1].total < 4_000_000


def test_tiny_128e_routes_as_the_26b_does():
    tiny, big = presets.tiny_128e(), presets.gemma4_26b_a4b()
    assert (tiny.num_experts, tiny.top_k_experts) == (big.num_experts, big.top_k_experts)
    assert tiny.num_periods == 2


def test_micro_is_two_periods_of_two_local_and_one_global_layer():
    config = presets.micro()
    assert (config.num_periods, [s.count for s in config.segments]) == (2, [2, 1])
    assert (config.num_experts, config.top_k_experts, config.hidden_size) == (4, 2, 32)
