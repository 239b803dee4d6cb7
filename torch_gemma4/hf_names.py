"""Names of Hugging Face's Gemma 4 tensors and their places in our stacked parameters.

Hugging Face keeps one set of tensors a layer; we stack layers of a segment as [P, C, ...]
(`Gemma4Config.segments`). The map is built from the configuration, one entry a tensor, and is a
bijection onto the slices of our parameters. Facts: transformers' `modeling_gemma4.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torch_gemma4.config import Gemma4Config
from torch_gemma4.layer_spec import LayerSpec

PUBLISHED_PREFIX = "model.language_model."
"""Before every text name but lm_head in the published files (Gemma4ForConditionalGeneration)."""
TEXT_ONLY_PREFIX = "model."
"""The same in files of Gemma4ForCausalLM."""
HEAD_NAME = "lm_head.weight"
"""The untied head; it takes no prefix."""
SKIPPED_PREFIXES = (
    "model.vision_tower.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
)
"""Other modalities, which a text model leaves unread."""

# Hugging Face's norms of a layer, in its order, around the routed branch and without it.
_NORMS = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "pre_mlp_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_MOE_NORMS = {
    "post_feedforward_layernorm_1": "post_mlp_norm",
    "post_feedforward_layernorm_2": "post_experts_norm",
    "pre_feedforward_layernorm_2": "pre_experts_norm",
}


@dataclass(frozen=True)
class Slot:
    """Where one Hugging Face tensor lives in our model."""

    parameter: str
    """Name of our parameter."""
    index: tuple[int | slice, ...]
    """Its part of the parameter: () is all, (period, layer of the segment) one layer's, and with a
    slice more, some rows of one layer's."""
    shape: tuple[int, ...]
    """Shape of the Hugging Face tensor."""
    transposed: bool = False
    """Our part has its last two dimensions the other way round."""
    split: bool = False
    """Our part is kept in two halves of experts, [2, E * A/2, B] instead of [E, A, B]: the same
    values in the same order."""

    def ours(self, tensor: torch.Tensor) -> torch.Tensor:
        """The Hugging Face tensor the way our part lies, but for the split; a view."""
        return tensor.transpose(-1, -2) if self.transposed else tensor

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of `ours`."""
        if not self.transposed:
            return self.shape
        return (*self.shape[:-2], self.shape[-1], self.shape[-2])

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offsets, sizes) of our part in the parameter, an entry a dimension of that."""
        starts = [place.start or 0 if isinstance(place, slice) else place for place in self.index]
        num_layers = sum(isinstance(place, int) for place in self.index)
        own = self.part_shape
        if self.split:
            own = (2, own[0] * own[1] // 2, own[2])
        sizes = (1,) * num_layers + own
        return (*starts, *[0] * (len(sizes) - len(starts))), sizes


def hf_to_ours(config: Gemma4Config, *, prefix: str = PUBLISHED_PREFIX) -> dict[str, Slot]:
    """Slot of every Hugging Face text tensor, in the order of Hugging Face's state dict (which
    decides how files are split). Raises ValueError for a prefix that is not one of the two."""
    if prefix not in (PUBLISHED_PREFIX, TEXT_ONLY_PREFIX):
        raise ValueError(
            f"prefix = {prefix!r}: give {PUBLISHED_PREFIX!r} (the published form) or "
            f"{TEXT_ONLY_PREFIX!r} (text only)"
        )
    table = (config.vocab_size, config.hidden_size)
    slots = {f"{prefix}embed_tokens.weight": Slot("embedding.weight", (), table)}
    places = [
        (period, number, position, segment.spec)
        for period in range(config.num_periods)
        for number, segment in enumerate(config.segments)
        for position in range(segment.count)
    ]
    for layer, (period, segment, position, spec) in enumerate(places):
        for theirs, ours, shape in _layer_tensors(config, spec):
            slots[f"{prefix}layers.{layer}.{theirs}"] = Slot(
                f"stack.segments.{segment}.{ours}",
                (period, position, *_rows(config, theirs)),
                shape,
                transposed=ours.startswith("experts.down"),
                split=ours.endswith("_halves"),
            )
    slots[f"{prefix}norm.weight"] = Slot("final_norm.weight", (), (config.hidden_size,))
    if not config.tie_word_embeddings:
        slots[HEAD_NAME] = Slot("lm_head.weight", (), table)
    return slots


def _layer_tensors(
    config: Gemma4Config, spec: LayerSpec
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(Hugging Face's name, ours, Hugging Face's shape) of the tensors of one layer."""
    width, mlp, head = config.hidden_size, config.intermediate_size, spec.head_dim
    queries, keys = config.num_attention_heads * head, spec.num_kv_heads * head

    yield "layer_scalar", "layer_scalar", (1,)
    for name, shape in {
        "q_proj": (queries, width),
        "q_norm": (head,),
        "k_norm": (head,),
        "k_proj": (keys, width),
        **({} if spec.k_eq_v else {"v_proj": (keys, width)}),
        "o_proj": (width, queries),
    }.items():
        yield f"self_attn.{name}.weight", f"attention.{name}.weight", shape
        if config.attention_bias and name.endswith("proj"):
            yield f"self_attn.{name}.bias", f"attention.{name}.bias", shape[:1]
    yield "mlp.gate_proj.weight", "mlp.gate_up_proj.weight", (mlp, width)
    yield "mlp.up_proj.weight", "mlp.gate_up_proj.weight", (mlp, width)
    yield "mlp.down_proj.weight", "mlp.down_proj.weight", (width, mlp)
    for theirs, ours in _NORMS.items():
        yield f"{theirs}.weight", f"{ours}.weight", (width,)
    if config.enable_moe_block:
        experts, expert = config.num_experts, config.moe_intermediate_size
        yield "router.scale", "router.scale", (width,)
        yield "router.per_expert_scale", "router.per_expert_scale", (experts,)
        yield "router.proj.weight", "router.proj.weight", (experts, width)
        suffix = "_halves" if config.split_expert_weights else ""
        yield "experts.gate_up_proj", f"experts.gate_up{suffix}", (experts, 2 * expert, width)
        yield "experts.down_proj", f"experts.down{suffix}", (experts, width, expert)
        for theirs, ours in _MOE_NORMS.items():
            yield f"{theirs}.weight", f"{ours}.weight", (width,)


def _rows(config: Gemma4Config, theirs: str) -> tuple[slice, ...]:
    """Rows of our parameter where two Hugging Face tensors share it: gate above up."""
    middle = config.intermediate_size
    rows = {"mlp.gate_proj.weight": slice(0, middle), "mlp.up_proj.weight": slice(middle, None)}
    return (rows[theirs],) if theirs in rows else ()
