"""The configuration: its layers and segments, what it refuses, and both published file forms."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_gemma4.config import Gemma4Config
from torch_gemma4.layer_spec import FULL, GLOBAL_ROPE, SLIDING, LayerOverride, RopeSpec
from torch_gemma4.presets import gemma4_26b_a4b, micro


def with_layers(layer_types, **fields):
    return replace(micro(), num_hidden_layers=len(layer_types), layer_types=layer_types, **fields)


@st.composite
def layer_lists(draw):
    """(layer types, overrides): a pattern repeated, sometimes with single layers set apart."""
    pattern = draw(st.lists(st.sampled_from([SLIDING, FULL]), min_size=1, max_size=7))
    kinds = tuple(pattern * draw(st.integers(1, 4)))
    sizes = st.fixed_dictionaries(
        {}, optional={"head_dim": st.sampled_from([8, 12]), "num_key_value_heads": st.just(4)}
    )
    overrides = draw(st.dictionaries(st.integers(0, len(kinds) - 1), sizes, max_size=2))
    per_layer = tuple(LayerOverride(layer=i, **overrides[i]) for i in sorted(overrides))
    return kinds, per_layer


@given(layer_lists())
def test_segments_reassemble_to_the_layers_in_the_shortest_period(case):
    config = with_layers(case[0], per_layer=case[1])
    period = [segment.spec for segment in config.segments for _ in range(segment.count)]
    layers = list(config.layers)
    assert period * config.num_periods == layers
    assert all(a.spec != b.spec for a, b in zip(config.segments, config.segments[1:], strict=False))
    for size in range(1, len(period)):
        assert len(layers) % size or layers[:size] * (len(layers) // size) != layers


def test_the_26b_is_five_periods_of_five_local_and_one_global_layer():
    config = gemma4_26b_a4b()
    local, glob = config.segments
    assert (config.num_periods, local.count, glob.count) == (5, 5, 1)
    assert (local.spec.head_dim, local.spec.num_kv_heads, local.spec.k_eq_v) == (256, 8, False)
    assert (glob.spec.head_dim, glob.spec.num_kv_heads, glob.spec.k_eq_v) == (512, 2, True)
    assert (local.spec.window, glob.spec.window) == (1024, None)
    assert [i for i, layer in enumerate(config.layers) if layer.kind == FULL] == [5, 11, 17, 23, 29]


def test_layers_that_do_not_repeat_are_one_period():
    config = with_layers((SLIDING, SLIDING, FULL))
    assert config.num_periods == 1
    assert [segment.count for segment in config.segments] == [2, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 0}, r"hidden_size = 0: .* at least 1"),
        ({"vocab_size": 64.0}, r"vocab_size = 64.0: give a whole number"),
        ({"num_experts": True}, r"num_experts = True: give a whole number"),
        ({"top_k_experts": 5}, r"top_k_experts = 5: .* num_experts = 4"),
        ({"moe_intermediate_size": 0}, r"moe_intermediate_size = 0"),
        ({"num_loss_tiles": 0}, r"num_loss_tiles = 0"),
        ({"split_expert_weights": 1}, r"split_expert_weights = 1: give true or false"),
        (
            {"split_expert_weights": True, "num_experts": 5},
            r"num_experts = 5: split_expert_weights halves it: give an even number, or turn that",
        ),
        (
            {"split_expert_weights": True, "moe_intermediate_size": 7},
            r"moe_intermediate_size = 7: split_expert_weights halves it",
        ),
        ({"head_dim": 7}, r"head_dim = 7: layer 0: give an even size"),
        ({"global_head_dim": 9}, r"global_head_dim = 9: layer 2: give an even size"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads = 3: layer 0: .*heads = 4"),
        ({"num_global_key_value_heads": 8}, r"num_global_key_value_heads = 8: layer 2: .*divisor"),
        ({"layer_types": (SLIDING, FULL)}, r"num_hidden_layers = 6: layer_types names 2 layers"),
        ({"layer_types": ("chunked",) * 6}, r"layer_types = 'chunked': give one of 'sliding_att"),
        ({"rms_norm_eps": 0.0}, r"rms_norm_eps = 0.0"),
        ({"final_logit_softcapping": 0.0}, r"final_logit_softcapping = 0.0: .*None"),
        ({"hidden_activation": "silu"}, r"hidden_activation = 'silu': only"),
        ({"pad_token_id": 64}, r"pad_token_id = 64: give an id below vocab_size = 64"),
        ({"z_loss_weight": -1.0}, r"z_loss_weight = -1.0: give a weight of at least 0"),
        ({"load_balance_loss_weight": -1.0}, r"load_balance_loss_weight = -1.0"),
        ({"router_z_loss_weight": -1.0}, r"router_z_loss_weight = -1.0"),
        ({"rms_norm_eps": None}, r"rms_norm_eps = None: give a number"),
        ({"final_logit_softcapping": "30"}, r"final_logit_softcapping = '30': give a number"),
        ({"pad_token_id": "0"}, r"pad_token_id = '0': give an id"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings = 'yes': give true or false"),
        ({"per_layer": (LayerOverride(layer=6),)}, r"per_layer = \[6\]: name layers of 0 to 5"),
        ({"per_layer": (LayerOverride(layer=1),) * 2}, r"per_layer = \[1, 1\]: .* each once"),
        ({"per_layer": (LayerOverride(layer=1, head_dim=0),)}, r"head_dim = 0: layer 1"),
    ],
)
def test_impossible_fields_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(micro(), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"theta": "1e4"}, "theta = '1e4': give a number"),
        ({"theta": 0.0}, "theta = 0.0: give a positive"),
        ({"theta": 1e4, "rope_type": "yarn"}, "rope_type = 'yarn': give one of 'default'"),
        ({"theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: .*default"),
        ({"theta": 1e4, "factor": 8.0}, "factor = 8.0: .*default"),
        (
            {"theta": 1e4, "rope_type": "proportional", "partial_rotary_factor": 1.5},
            "partial_rotary_factor = 1.5: .* between 0 and 1",
        ),
        ({"theta": 1e4, "rope_type": "proportional", "factor": 0.0}, "factor = 0.0: give a pos"),
    ],
)
def test_impossible_rotary_tables_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeSpec(**fields)


def test_expert_sizes_count_only_with_a_routed_branch():
    fields = {"num_experts": 0, "top_k_experts": 0, "moe_intermediate_size": 0}
    assert not replace(micro(), enable_moe_block=False, **fields).enable_moe_block


def test_every_oracle_case_says_the_same_in_all_its_forms(hf_case):
    files = sorted(hf_case.glob("config*.json"))
    configs = [Gemma4Config.from_hf_file(file) for file in files]
    assert all(config == configs[0] for config in configs)
    data = [json.loads(file.read_text()) for file in files]
    forms = {"per_layer_config" in part.get("text_config", part) for part in data}
    assert len(forms) == len(files)


@given(layer_lists(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_what_is_written_reads_back(case, k_eq_v, moe, tied, text_only):
    config = with_layers(
        case[0],
        per_layer=case[1],
        attention_k_eq_v=k_eq_v,
        enable_moe_block=moe,
        attention_bias=not moe,
        tie_word_embeddings=tied,
        final_logit_softcapping=None if tied else 20.0,
        rope_full=replace(GLOBAL_ROPE, factor=8.0),
        pad_token_id=3,
    )
    data = json.loads(json.dumps(config.to_hf_dict(text_only=text_only)))
    back = Gemma4Config.from_hf(data)
    assert back.layers == config.layers
    resolved = {"per_layer", "global_head_dim", "num_global_key_value_heads"}
    unread = () if moe else ("num_experts", "top_k_experts", "moe_intermediate_size")
    for name in set(vars(config)) - resolved - set(unread):
        assert getattr(back, name) == getattr(config, name), name
    # A second time nothing is left to normalise.
    assert Gemma4Config.from_hf(back.to_hf_dict(text_only=text_only)) == back


def test_published_names_are_written_where_they_suffice():
    text = gemma4_26b_a4b().to_hf_dict()["text_config"]
    assert (text["global_head_dim"], text["num_global_key_value_heads"]) == (512, 2)
    assert "per_layer_config" not in text
    assert text["rope_parameters"]["full_attention"] == {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    }


def hf_text(**changes):
    """The flat text config of `micro`, changed."""
    return micro().to_hf_dict(text_only=True) | changes


def without(*keys):
    return {key: value for key, value in hf_text().items() if key not in keys}


@pytest.mark.parametrize("keys", [("02", "05"), ("2", "5"), ("2", "05")])
def test_per_layer_keys_may_be_padded(keys):
    sizes = {"head_dim": 16, "num_key_value_heads": 1}
    text = without("global_head_dim", "num_global_key_value_heads")
    assert Gemma4Config.from_hf(text | {"per_layer_config": dict.fromkeys(keys, sizes)}) == micro()


def test_per_layer_sizes_are_honoured_where_layers_of_one_kind_differ():
    overrides = {"1": {"head_dim": 4}, "2": {"head_dim": 16}, "5": {"num_key_value_heads": 4}}
    config = Gemma4Config.from_hf(hf_text(per_layer_config=overrides))
    sizes = [(layer.head_dim, layer.num_kv_heads) for layer in config.layers]
    assert sizes == [(8, 2), (4, 2), (16, 2), (8, 2), (8, 2), (8, 4)]
    assert config.num_periods == 1


def test_per_layer_config_silences_the_old_keys():
    text = hf_text(per_layer_config={}, global_head_dim=64)
    assert {layer.head_dim for layer in Gemma4Config.from_hf(text).layers} == {8}


def test_global_kv_heads_count_only_with_shared_keys_and_values():
    config = Gemma4Config.from_hf(hf_text(attention_k_eq_v=False))
    full = config.layers[2]
    assert (full.num_kv_heads, full.head_dim, full.k_eq_v) == (2, 16, False)


def test_absent_keys_take_the_values_transformers_takes():
    absent = (
        "attention_k_eq_v attention_bias enable_moe_block final_logit_softcapping layer_types "
        "pad_token_id rms_norm_eps rope_parameters global_head_dim num_global_key_value_heads"
    ).split()
    config = Gemma4Config.from_hf(without(*absent) | {"num_hidden_layers": 8})
    assert config.layer_types == (*(SLIDING,) * 5, FULL, SLIDING, FULL)
    assert (config.global_head_dim, config.num_global_key_value_heads) == (512, 2)
    assert not (config.attention_k_eq_v or config.attention_bias or config.enable_moe_block)
    assert (config.final_logit_softcapping, config.pad_token_id) == (None, 0)
    assert (config.rope_sliding, config.rope_full) == (micro().rope_sliding, GLOBAL_ROPE)


def test_linear_rotary_scaling_is_proportional_with_all_pairs():
    ropes = {
        SLIDING: {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        FULL: {"rope_theta": 1e6},
    }
    config = Gemma4Config.from_hf(hf_text(rope_parameters=ropes))
    assert config.rope_sliding == RopeSpec(theta=1e4, rope_type="proportional", factor=4.0)
    assert config.rope_full == RopeSpec(theta=1e6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_exprts": 4, "foo": 1}, "config key = 'foo, num_exprts': not a key"),
        ({"hidden_size": None}, "config key = 'hidden_size': missing"),
        ({"num_experts": None}, "config key = 'num_experts': missing"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input = 256: not supported"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2: not supported"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp = True: not supported"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1: not supported"),
        ({"model_type": "gemma3_text"}, "model_type = 'gemma3_text': give the config.json of"),
        ({"rope_parameters": {SLIDING: {"rope_theta": 1e4}}}, "no entry for full_attention"),
        ({"rope_parameters": {"rope_theta": 1e4}}, r"rope_parameters = \['rope_theta'\]: give"),
        ({"rope_parameters": {SLIDING: {}, FULL: {}}}, "sliding_attention = {}: missing rope_th"),
        (
            {"rope_parameters": {SLIDING: {"rope_theta": 1e4, "beta": 1}, FULL: None}},
            r"rope_parameters = \['sliding_attention'\]: no entry for full_attention",
        ),
        (
            {"rope_parameters": {SLIDING: {"rope_theta": 1e4, "beta": 1}, FULL: {}}},
            r"rope_parameters of sliding_attention = \['beta'\]: not supported",
        ),
        (
            {"rope_parameters": {SLIDING: {"rope_theta": 1.0, "rope_type": "yarn"}, FULL: {}}},
            "rope_parameters of sliding_attention: rope_type = 'yarn'",
        ),
        ({"layer_types": 6}, "layer_types = 6: give the list"),
        ({"layer_types": [[FULL]] * 6}, "layer_types = .*: give the list"),
        ({"text_config": "x"}, "text_config = 'str': give a JSON object"),
        ({"rope_parameters": []}, "rope_parameters = 'list': give a JSON object"),
        ({"rope_parameters": {SLIDING: 5, FULL: 5}}, "sliding_attention = 'int': give a JSON obj"),
        ({"per_layer_config": [1]}, "per_layer_config = 'list': give a JSON object"),
        ({"per_layer_config": {"5": None}}, r"per_layer_config\['5'\] = 'NoneType': give a JSON"),
        ({"per_layer_config": {"6": {}}}, r"per_layer_config\['6'\] = {}: give each layer of 0"),
        ({"per_layer_config": {"x": {}}}, r"per_layer_config\['x'\] = {}: give each layer"),
        ({"per_layer_config": {"5": {}, "05": {}}}, r"per_layer_config\['05'\] = .*at most once"),
        (
            {"per_layer_config": {"5": {"sliding_window": 4}}},
            r"per_layer_config\['5'\] = \['sliding_window'\]: only head_dim and num_key_value",
        ),
    ],
)
def test_unreadable_files_are_refused_by_key(changes, message):
    with pytest.raises(ValueError, match=message):
        Gemma4Config.from_hf(hf_text(**changes))


def test_per_layer_inputs_must_be_switched_off_in_so_many_words():
    with pytest.raises(ValueError, match="hidden_size_per_layer_input = 256: not supported"):
        Gemma4Config.from_hf(without("hidden_size_per_layer_input"))


def test_a_file_and_its_text_config_must_agree_on_the_head():
    data = micro().to_hf_dict() | {"tie_word_embeddings": False}
    with pytest.raises(ValueError, match=r"tie_word_embeddings = \(False, True\): .*disagree"):
        Gemma4Config.from_hf(data)
    del data["text_config"]["tie_word_embeddings"]
    assert not Gemma4Config.from_hf(data).tie_word_embeddings


def test_files_are_named_in_errors(tmp_path):
    with pytest.raises(ValueError, match=r"config.json: no such file; give a model folder"):
        Gemma4Config.from_hf_file(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"text_config": ')
    with pytest.raises(ValueError, match=r"config.json: not JSON .*; download it again"):
        Gemma4Config.from_hf_file(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json: config = 'list': give a JSON object"):
        Gemma4Config.from_hf_file(tmp_path)
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"config.json: cannot be read"):
        Gemma4Config.from_hf_file(tmp_path / "folder")
    (tmp_path / "config.json").write_text(json.dumps(hf_text(head_dim=7)))
    with pytest.raises(ValueError, match=r"config.json: head_dim = 7"):
        Gemma4Config.from_hf_file(tmp_path)
