"""What a Gemma 4 text decoder is: sizes, the kind of every layer, and the losses it trains on.

`Gemma4Config` is the only description the rest of the package reads. It comes from a preset
(`torch_gemma4.presets`) or from a published `config.json`. `layers` resolves it to one `LayerSpec`
a layer, and `segments` folds those into the repeating pattern that parameters are stacked by.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from torch_gemma4.hf_config import fields_from_hf, hf_from_config
from torch_gemma4.layer_spec import (
    FULL,
    GLOBAL_ROPE,
    LOCAL_ROPE,
    LayerKind,
    LayerOverride,
    LayerSpec,
    RopeSpec,
    Segment,
    require,
    require_choice,
    require_count,
    require_number,
)

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_global_key_value_heads",
    "global_head_dim",
    "sliding_window",
    "num_loss_tiles",
)
_MOE_SIZES = ("num_experts", "top_k_experts", "moe_intermediate_size")
_SWITCHES = (
    "attention_k_eq_v",
    "attention_bias",
    "enable_moe_block",
    "tie_word_embeddings",
    "layer_scalar_trainable",
    "split_expert_weights",
)
_LOSS_WEIGHTS = ("load_balance_loss_weight", "router_z_loss_weight", "z_loss_weight")
TRAINING_FIELDS = (
    "layer_scalar_trainable",
    *_LOSS_WEIGHTS,
    "num_loss_tiles",
    "split_expert_weights",
)
"""Fields of Gemma4Config that say how it is trained and stored, of which a `config.json` knows
nothing."""


@dataclass(frozen=True, kw_only=True)
class Gemma4Config:
    """A Gemma 4 text decoder. Names are Hugging Face's where Hugging Face has one.

    Raises ValueError, naming field, value and remedy, for anything no model can be built from.
    """

    vocab_size: int
    """V, rows of the embedding."""
    hidden_size: int
    """D, width of the residual stream."""
    num_hidden_layers: int
    """L."""
    layer_types: tuple[LayerKind, ...]
    """The kind of every layer, honoured as it stands: no pattern is assumed."""
    intermediate_size: int
    """M, width of the dense MLP that every layer has."""

    num_attention_heads: int
    """N, query heads of every layer."""
    num_key_value_heads: int
    """G of sliding layers."""
    head_dim: int
    """H of sliding layers."""
    num_global_key_value_heads: int
    """G of full layers."""
    global_head_dim: int
    """H of full layers."""
    sliding_window: int
    """Keys a query of a sliding layer may see, itself included."""
    attention_k_eq_v: bool = True
    """Full layers take their values from the raw key projection and have no v_proj."""
    attention_bias: bool = False
    """The attention projections have a bias."""
    rope_sliding: RopeSpec = LOCAL_ROPE
    """Rotary table of sliding layers."""
    rope_full: RopeSpec = GLOBAL_ROPE
    """Rotary table of full layers."""
    per_layer: tuple[LayerOverride, ...] = ()
    """Layers whose head sizes are not those of their kind, by increasing index."""

    enable_moe_block: bool = True
    """Every layer has a routed branch beside its dense MLP."""
    num_experts: int = 0
    """E. Read only with enable_moe_block, like the two below."""
    top_k_experts: int = 0
    """K, experts a token is sent to."""
    moe_intermediate_size: int = 0
    """F, width of one expert."""
    split_expert_weights: bool = False
    """Expert weights are stored as two halves of experts, [2, E * F, D] and [2, E * F/2, D], each
    gathered on its own (`pallas_ops.split_gmm`): the same values in the same order, the same model.
    Needs even E and F; read only with enable_moe_block."""

    hidden_activation: str = "gelu_pytorch_tanh"
    """Gate activation of the dense MLP and of the experts."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in every norm."""
    final_logit_softcapping: float | None = None
    """c in logits = c tanh(logits / c); None leaves logits alone."""
    tie_word_embeddings: bool = True
    """The head is the embedding; otherwise the model has lm_head.weight."""
    pad_token_id: int | None = None
    """Id of padding, kept for export: nothing in the model treats it apart."""

    layer_scalar_trainable: bool = True
    """layer_scalar gets a gradient (Hugging Face keeps it a constant buffer)."""
    load_balance_loss_weight: float = 0.0
    """Weight of the load-balancing loss."""
    router_z_loss_weight: float = 0.0
    """Weight of the router's z-loss."""
    z_loss_weight: float = 0.0
    """Weight of the vocabulary's z-loss."""
    num_loss_tiles: int = 1
    """Tiles the sequence is cut into for the vocabulary loss; must divide S."""

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """Config from the content of a `config.json`, in either published form (head sizes of full
        layers as `global_head_dim` / `num_global_key_value_heads`, or under `per_layer_config`),
        whole or its `text_config` alone. Raises ValueError naming any key it does not know, lacks,
        or cannot honour."""
        return cls(**fields_from_hf(data))

    @classmethod
    def from_hf_file(cls, path: str | Path) -> Self:
        """`from_hf` of a file, or of the `config.json` in a folder."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"{path}: no such file; give a model folder or a config.json"
            ) from None
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error}); download it again") from None
        try:
            return cls.from_hf(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Config from `dataclasses.asdict` of one, as JSON gives it back. Raises TypeError for a
        field that there is none of, besides ValueError."""
        nested = {
            "layer_types": tuple(data["layer_types"]),
            "per_layer": tuple(LayerOverride(**override) for override in data["per_layer"]),
            "rope_sliding": RopeSpec(**data["rope_sliding"]),
            "rope_full": RopeSpec(**data["rope_full"]),
        }
        return cls(**{**data, **nested})

    def trained_as(self, other: Self) -> Self:
        """This model with the `TRAINING_FIELDS` of `other`."""
        return replace(self, **{name: getattr(other, name) for name in TRAINING_FIELDS})

    def to_hf_dict(self, *, text_only: bool = False, dtype: str = "float32") -> dict[str, Any]:
        """Content of a `config.json` that `from_hf` (and transformers) read back as this model.
        Training fields, which the format has no place for, are left out. `text_only` gives the flat
        form of Gemma4ForCausalLM rather than the published one with its nested `text_config`."""
        return hf_from_config(self, text_only=text_only, dtype=dtype)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The L layers in order."""
        overrides = {override.layer: override for override in self.per_layer}
        return tuple(
            self._layer(kind, overrides.get(index, LayerOverride(layer=index)))
            for index, kind in enumerate(self.layer_types)
        )

    @property
    def num_periods(self) -> int:
        """P, how often the shortest repeating pattern of layers occurs; 1 if nothing repeats."""
        return self.num_hidden_layers // _shortest_period(self.layers)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """One period as runs of equal layers: layer c of a segment in period p is layer
        p * (L / P) + (layers in earlier segments) + c of the model."""
        period = self.layers[: self.num_hidden_layers // self.num_periods]
        return tuple(Segment(spec, len(list(run))) for spec, run in groupby(period))

    def _layer(self, kind: LayerKind, override: LayerOverride) -> LayerSpec:
        full = kind == FULL
        num_kv_heads = self.num_global_key_value_heads if full else self.num_key_value_heads
        if override.num_key_value_heads is not None:
            num_kv_heads = override.num_key_value_heads
        head_dim = self.global_head_dim if full else self.head_dim
        if override.head_dim is not None:
            head_dim = override.head_dim
        return LayerSpec(
            kind=kind,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            k_eq_v=full and self.attention_k_eq_v,
            window=None if full else self.sliding_window,
            rope=self.rope_full if full else self.rope_sliding,
        )

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            value = getattr(self, name)
            require(isinstance(value, bool), name, value, "give true or false")
        for name in (*_LOSS_WEIGHTS, "rms_norm_eps"):
            require_number(name, getattr(self, name))
        if self.final_logit_softcapping is not None:
            require_number("final_logit_softcapping", self.final_logit_softcapping)
        for name in _SIZES + (_MOE_SIZES if self.enable_moe_block else ()):
            require_count(name, getattr(self, name))
        for name in _LOSS_WEIGHTS:
            value = getattr(self, name)
            require(value >= 0, name, value, "give a weight of at least 0; 0 turns it off")
        require(self.rms_norm_eps > 0, "rms_norm_eps", self.rms_norm_eps, "give 1e-6 or the like")
        cap = self.final_logit_softcapping
        require(
            cap is None or cap > 0, "final_logit_softcapping", cap, "give a positive cap or None"
        )
        require(
            self.hidden_activation == "gelu_pytorch_tanh",
            "hidden_activation",
            self.hidden_activation,
            'only "gelu_pytorch_tanh" is supported',
        )
        require(
            self.pad_token_id is None or self.pad_token_id in range(self.vocab_size),
            "pad_token_id",
            self.pad_token_id,
            f"give an id below vocab_size = {self.vocab_size}, or None",
        )
        require(
            not self.enable_moe_block or self.top_k_experts <= self.num_experts,
            "top_k_experts",
            self.top_k_experts,
            f"a token has only num_experts = {self.num_experts} to choose from",
        )
        if self.enable_moe_block and self.split_expert_weights:
            for name in ("num_experts", "moe_intermediate_size"):
                value = getattr(self, name)
                remedy = "split_expert_weights halves it: give an even number, or turn that off"
                require(value % 2 == 0, name, value, remedy)
        self._check_layer_lists()
        for index, spec in enumerate(self.layers):
            _check_heads(index, spec, self.num_attention_heads)

    def _check_layer_lists(self) -> None:
        for kind in self.layer_types:
            require_choice("layer_types", kind, LayerKind)
        require(
            len(self.layer_types) == self.num_hidden_layers,
            "num_hidden_layers",
            self.num_hidden_layers,
            f"layer_types names {len(self.layer_types)} layers; make the two agree",
        )
        indices = [override.layer for override in self.per_layer]
        require(
            indices == sorted(set(indices) & set(range(self.num_hidden_layers))),
            "per_layer",
            indices,
            f"name layers of 0 to {self.num_hidden_layers - 1}, each once, by increasing index",
        )


def _check_heads(index: int, spec: LayerSpec, num_heads: int) -> None:
    head_dim, kv_heads = (
        ("global_head_dim", "num_global_key_value_heads")
        if spec.kind == FULL
        else ("head_dim", "num_key_value_heads")
    )
    for name, value in ((head_dim, spec.head_dim), (kv_heads, spec.num_kv_heads)):
        require_count(name, value, f"layer {index}: ")
    require(
        spec.head_dim % 2 == 0,
        head_dim,
        spec.head_dim,
        f"layer {index}: give an even size, as rotary embedding turns pairs",
    )
    require(
        num_heads % spec.num_kv_heads == 0,
        kv_heads,
        spec.num_kv_heads,
        f"layer {index}: give a divisor of num_attention_heads = {num_heads}",
    )


def _shortest_period(layers: Sequence[LayerSpec]) -> int:
    length = len(layers)
    return next(
        p for p in range(1, length + 1) if length % p == 0 and layers[p:] == layers[: length - p]
    )
