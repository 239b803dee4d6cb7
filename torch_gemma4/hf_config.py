"""The published `config.json` of Gemma 4, read and written.

Facts: transformers' `Gemma4TextConfig`. A file states the head sizes of full layers either as
`global_head_dim` and `num_global_key_value_heads` (the published form; the latter counts only with
`attention_k_eq_v`) or, since transformers 5.15, under `per_layer_config`, whose entries replace
`head_dim` and `num_key_value_heads` of single layers and before which the old keys count nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_gemma4.layer_spec import FULL, SLIDING, LayerOverride, RopeSpec, require

if TYPE_CHECKING:
    from torch_gemma4.config import Gemma4Config

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
)
_REQUIRED_WITH_MOE = ("num_experts", "top_k_experts", "moe_intermediate_size")

# Keys that may be absent, with the value transformers then takes.
_OPTIONAL: dict[str, Any] = {
    "attention_k_eq_v": False,
    "attention_bias": False,
    "enable_moe_block": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}

# Features this model does not have: the values under which they are off, and transformers' value
# where the key is absent.
_SWITCHED_OFF: dict[str, tuple[tuple[Any, ...], Any]] = {
    "hidden_size_per_layer_input": ((0, None), 256),
    "num_kv_shared_layers": ((0, None), 0),
    "use_double_wide_mlp": ((False, None), False),
    "use_bidirectional_attention": (("vision", None, False), None),
    "attention_dropout": ((0, None), 0.0),
}

# Resolved below: the layer list, head sizes of single layers and rotary tables.
_RESOLVED = (
    "layer_types",
    "rope_parameters",
    "per_layer_config",
    "global_head_dim",
    "num_global_key_value_heads",
)

# Keys without any effect on text mathematics, among them those every transformers config has.
_IRRELEVANT = (
    "allow_global_per_layer_attribute_access",
    "architectures",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "max_position_embeddings",
    "model_type",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "serialize_explicit_per_layer_config",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "vocab_size_per_layer_input",
    "_name_or_path",
)

_KNOWN = {*_REQUIRED, *_REQUIRED_WITH_MOE, *_OPTIONAL, *_SWITCHED_OFF, *_RESOLVED, *_IRRELEVANT}


def fields_from_hf(data: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Gemma4Config` for the content of a `config.json` (see `Gemma4Config.from_hf`).

    Both forms of one model give the same arguments. Raises ValueError naming the key.
    """
    text = _text_config(data)
    unknown = sorted(set(text) - _KNOWN)
    require(not unknown, "config key", ", ".join(unknown), "not a key of a Gemma 4 text_config")
    for key, (off, absent) in _SWITCHED_OFF.items():
        value = text.get(key, absent)
        require(value in off, key, value, f"not supported; only {off[0]!r} is")
    values = {key: text.get(key, default) for key, default in _OPTIONAL.items()}
    required = _REQUIRED + (_REQUIRED_WITH_MOE if values["enable_moe_block"] else ())
    missing = [key for key in required if text.get(key) is None]
    require(not missing, "config key", ", ".join(missing), "missing; give its value")
    values |= {key: text[key] for key in required}

    num_layers = values["num_hidden_layers"]
    layer_types = text.get("layer_types")
    if layer_types is None:
        layer_types = [
            FULL if (i + 1) % 6 == 0 or i + 1 == num_layers else SLIDING for i in range(num_layers)
        ]
    is_list = isinstance(layer_types, Sequence) and all(isinstance(t, str) for t in layer_types)
    require(is_list, "layer_types", layer_types, "give the list of every layer's kind")
    values["layer_types"] = tuple(layer_types)
    return values | _ropes(text.get("rope_parameters"), layer_types) | _head_sizes(text, values)


def _text_config(data: Mapping[str, Any]) -> Mapping[str, Any]:
    _require_object("config", data)
    nested = data.get("text_config")
    text = data if nested is None else nested
    _require_object("text_config", text)
    for part, expected in ((data, ("gemma4", "gemma4_text")), (text, ("gemma4_text",))):
        found = part.get("model_type", "gemma4_text")
        require(found in expected, "model_type", found, "give the config.json of a Gemma 4 model")
    if nested is None:
        return text
    outer = data.get("tie_word_embeddings")
    inner = text.get("tie_word_embeddings", outer)
    require(
        outer is None or inner == outer,
        "tie_word_embeddings",
        (outer, inner),
        "the file and its text_config disagree; make them equal",
    )
    return {**text, **({} if inner is None else {"tie_word_embeddings": inner})}


def _require_object(name: str, value: object) -> None:
    is_object = isinstance(value, Mapping)
    require(is_object, name, type(value).__name__, "give a JSON object, as a config.json has")


def _ropes(parameters: Mapping[str, Any] | None, layer_types: list[str]) -> dict[str, RopeSpec]:
    """The tables a file states; absent altogether they are the published ones, as transformers'."""
    if parameters is None:
        return {}
    _require_object("rope_parameters", parameters)
    kinds = {SLIDING: "rope_sliding", FULL: "rope_full"}
    unknown = sorted(set(parameters) - set(kinds))
    require(not unknown, "rope_parameters", unknown, f"give {SLIDING} and {FULL} only")
    stated = {kind: entry for kind, entry in parameters.items() if entry is not None}
    missing = sorted((set(layer_types) & set(kinds)) - set(stated))
    require(not missing, "rope_parameters", sorted(stated), f"no entry for {', '.join(missing)}")
    return {kinds[kind]: _rope_spec(kind, entry) for kind, entry in stated.items()}


def _rope_spec(kind: str, rope: Mapping[str, Any]) -> RopeSpec:
    where = f"rope_parameters of {kind}"
    _require_object(where, rope)
    known = {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}
    unknown = sorted(set(rope) - known)
    require(not unknown, where, unknown, f"not supported; only {', '.join(sorted(known))} are")
    require(rope.get("rope_theta") is not None, where, dict(rope), "missing rope_theta")
    rope_type = rope.get("rope_type", "default")
    try:
        return RopeSpec(
            theta=rope["rope_theta"],
            # "linear" is "proportional" with every pair turning.
            rope_type="proportional" if rope_type == "linear" else rope_type,
            partial_rotary_factor=rope.get("partial_rotary_factor", 1.0),
            factor=rope.get("factor", 1.0),
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _head_sizes(text: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Head sizes of full layers, and `per_layer` for what one size a kind cannot say."""
    base = (values["head_dim"], values["num_key_value_heads"])
    kinds = values["layer_types"]
    if "per_layer_config" in text:
        overrides = _overrides(text["per_layer_config"] or {}, len(kinds))
    else:
        num_kv_heads = (
            text.get("num_global_key_value_heads") if values["attention_k_eq_v"] else None
        )
        override = (text.get("global_head_dim", 512), num_kv_heads)
        overrides = {index: override for index, kind in enumerate(kinds) if kind == FULL}
    resolved = [
        tuple(
            default if own is None else own
            for own, default in zip(overrides.get(index, base), base, strict=True)
        )
        for index in range(len(kinds))
    ]
    full = Counter(sizes for sizes, kind in zip(resolved, kinds, strict=True) if kind == FULL)
    usual = {SLIDING: base, FULL: full.most_common(1)[0][0] if full else base}
    return {
        "global_head_dim": usual[FULL][0],
        "num_global_key_value_heads": usual[FULL][1],
        "per_layer": tuple(
            LayerOverride(layer=index, head_dim=sizes[0], num_key_value_heads=sizes[1])
            for index, (sizes, kind) in enumerate(zip(resolved, kinds, strict=True))
            if sizes != usual.get(kind, base)
        ),
    }


def _overrides(per_layer: Mapping[str, Any], num_layers: int) -> dict[int, tuple[Any, Any]]:
    _require_object("per_layer_config", per_layer)
    overrides: dict[int, tuple[Any, Any]] = {}
    for key, entry in per_layer.items():
        where = f"per_layer_config[{key!r}]"
        _require_object(where, entry)
        index = int(key) if str(key).isdecimal() else -1
        remedy = f"give each layer of 0 to {num_layers - 1} at most once"
        require(0 <= index < num_layers and index not in overrides, where, entry, remedy)
        unknown = sorted(set(entry) - {"head_dim", "num_key_value_heads"})
        require(not unknown, where, unknown, "only head_dim and num_key_value_heads may differ")
        overrides[index] = (entry.get("head_dim"), entry.get("num_key_value_heads"))
    return overrides


def hf_from_config(config: "Gemma4Config", *, text_only: bool, dtype: str) -> dict[str, Any]:
    """Content of a `config.json` (see `Gemma4Config.to_hf_dict`), in the published key names, or
    with `per_layer_config` where those cannot say it."""
    copied = (*_REQUIRED, *_OPTIONAL, *(_REQUIRED_WITH_MOE if config.enable_moe_block else ()))
    text = {key: getattr(config, key) for key in copied}
    text |= {key: off[0] for key, (off, _) in _SWITCHED_OFF.items()}
    text |= {
        "model_type": "gemma4_text",
        "dtype": dtype,
        "layer_types": list(config.layer_types),
        "rope_parameters": {
            SLIDING: _hf_rope(config.rope_sliding),
            FULL: _hf_rope(config.rope_full),
        },
    }
    same_kv_heads = config.num_global_key_value_heads == config.num_key_value_heads
    if not config.per_layer and (config.attention_k_eq_v or same_kv_heads):
        text["global_head_dim"] = config.global_head_dim
        text["num_global_key_value_heads"] = config.num_global_key_value_heads
    else:
        width = len(str(config.num_hidden_layers - 1))
        text["per_layer_config"] = {
            str(index).zfill(width): {
                "head_dim": layer.head_dim,
                "num_key_value_heads": layer.num_kv_heads,
            }
            for index, layer in enumerate(config.layers)
            if (layer.head_dim, layer.num_kv_heads) != (config.head_dim, config.num_key_value_heads)
        }
    if text_only:
        return {"architectures": ["Gemma4ForCausalLM"]} | dict(sorted(text.items()))
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "dtype": dtype,
        "model_type": "gemma4",
        "text_config": dict(sorted(text.items())),
        "tie_word_embeddings": config.tie_word_embeddings,
        "vision_config": None,
    }


def _hf_rope(rope: RopeSpec) -> dict[str, Any]:
    entry: dict[str, Any] = {"rope_type": rope.rope_type, "rope_theta": rope.theta}
    if rope.rope_type == "proportional":
        entry["partial_rotary_factor"] = rope.partial_rotary_factor
        if rope.factor != 1.0:
            entry["factor"] = rope.factor
    return entry
