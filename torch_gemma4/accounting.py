"""What a configuration costs: parameters, training FLOPs and bytes of state, by arithmetic alone.

FLOPs are counted as the published figures of this model are (MaxText's convention, model.md 4): a
multiply-add is 2, training is 3 forward passes, recomputation is not counted, attention is causal
and windowed, and the router's softmax, the norms and the element-wise work are left out. At 16,384
tokens and 2 sequences a chip the 26B comes to 923.287 TFLOP a chip and step.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod

from torch_gemma4.config import Gemma4Config
from torch_gemma4.hf_names import TEXT_ONLY_PREFIX, hf_to_ours
from torch_gemma4.layer_spec import LayerSpec, require_count

# Part of the model by a piece of our parameters' names; the first that occurs counts.
_PARTS = {
    "embedding.": "embedding",
    "lm_head.": "head",
    ".experts.": "experts",
    ".router.": "routers",
    ".mlp.": "dense MLPs",
    ".attention.": "attention",
    "norm.": "norms",
    ".layer_scalar": "layer scalars",
}


@dataclass(frozen=True)
class PartCount:
    """Parameters of one part of the model."""

    part: str
    """Its name, or "total"."""
    total: int
    """Stored parameters."""
    active: int
    """Parameters one token meets: of the experts, the share top_k / num_experts."""


@dataclass(frozen=True)
class PartFlops:
    """FLOPs of one part of the model, a chip and step."""

    part: str
    """Its name."""
    forward: int
    """FLOPs of one forward pass."""

    @property
    def training(self) -> int:
        """FLOPs of forward and backward, the latter twice the former."""
        return 3 * self.forward


@dataclass(frozen=True)
class FlopTable:
    """FLOPs of the parts that have any, a chip and step."""

    parts: tuple[PartFlops, ...]
    """Parts in the order data meets them within a layer, then the head."""

    @property
    def forward(self) -> int:
        """FLOPs of one forward pass of everything."""
        return sum(part.forward for part in self.parts)

    @property
    def training(self) -> int:
        """FLOPs of one training step."""
        return sum(part.training for part in self.parts)


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one chip: matrices spread evenly over all chips, 1-D parameters on each."""

    parameters: int
    """Master weights."""
    moments: int
    """What the optimizer keeps, AdamW's two moments by default."""
    gradients: int
    """Gradients, while they live."""
    gathered_layer: int
    """The largest layer whole in the compute dtype, as gathered while it runs."""
    gathered_embedding: int
    """The embedding table whole in the compute dtype, as gathered for look-up and head."""

    @property
    def persistent(self) -> int:
        """Bytes held from step to step."""
        return self.parameters + self.moments


def parameter_table(config: Gemma4Config) -> list[PartCount]:
    """Parameters by part, then their total. A tied embedding counts once, in both columns."""
    counts = dict.fromkeys(_PARTS.values(), 0)
    for slot in hf_to_ours(config).values():
        part = next(part for piece, part in _PARTS.items() if piece in slot.parameter)
        counts[part] += prod(slot.shape)
    table = [
        PartCount(part, count, _active(config, count) if part == "experts" else count)
        for part, count in counts.items()
        if count
    ]
    total, active = (sum(getattr(row, name) for row in table) for name in ("total", "active"))
    return [*table, PartCount("total", total, active)]


def _active(config: Gemma4Config, expert_parameters: int) -> int:
    return expert_parameters // config.num_experts * config.top_k_experts


def training_flops(
    config: Gemma4Config, *, sequence_length: int, sequences_per_chip: int
) -> FlopTable:
    """FLOPs by part for `sequences_per_chip` sequences of `sequence_length` tokens on a chip.

    A query of a layer with window W < S meets W keys, less the W^2 / 2 missing at the start; one
    without, or with W >= S, meets S / 2 on average. Raises ValueError for lengths below 1.
    """
    _require_positive(sequence_length=sequence_length, sequences_per_chip=sequences_per_chip)
    tokens = sequence_length * sequences_per_chip
    width, layers = config.hidden_size, config.num_hidden_layers
    kinds: dict[str, list[LayerSpec]] = {"local": [], "global": []}
    for spec in config.layers:
        kinds["global" if spec.window is None else "local"].append(spec)
    parts = {
        f"{kind} attention projections": sum(_projections(config, spec, tokens) for spec in specs)
        for kind, specs in kinds.items()
    } | {
        f"{kind} attention": sequences_per_chip
        * sum(_attention(config, spec, sequence_length) for spec in specs)
        for kind, specs in kinds.items()
    }
    parts["dense MLPs"] = layers * 6 * tokens * width * config.intermediate_size
    if config.enable_moe_block:
        rows = tokens * config.top_k_experts
        parts["routers"] = layers * 2 * tokens * width * config.num_experts
        parts["experts"] = layers * 6 * rows * width * config.moe_intermediate_size
    parts["head"] = 2 * tokens * width * config.vocab_size
    return FlopTable(tuple(PartFlops(part, flops) for part, flops in parts.items() if flops))


def _projections(config: Gemma4Config, spec: LayerSpec, tokens: int) -> int:
    """q and o, k, and v where it has a projection of its own."""
    heads = 2 * config.num_attention_heads + (1 if spec.k_eq_v else 2) * spec.num_kv_heads
    return 2 * tokens * config.hidden_size * heads * spec.head_dim


def _attention(config: Gemma4Config, spec: LayerSpec, length: int) -> int:
    """Scores and weighted values of one sequence: 2 products over its causal, windowed pairs."""
    window = length if spec.window is None else min(spec.window, length)
    twice_pairs = 2 * length * window - window**2
    return 2 * twice_pairs * config.num_attention_heads * spec.head_dim


def state_bytes(
    config: Gemma4Config,
    num_chips: int,
    *,
    parameter_bytes: int = 4,
    compute_bytes: int = 2,
    num_moments: Callable[[str], int] = lambda name: 2,
) -> StateBytes:
    """State of one of `num_chips` chips; weights, gradients and moments take `parameter_bytes` an
    element, gathered weights `compute_bytes`; `num_moments` is asked by a parameter's name. Raises
    ValueError for less than 1 chip."""
    _require_positive(num_chips=num_chips)
    sharded, moments, replicated, replicated_moments = 0, Counter(), 0, 0
    layers = [0] * config.num_hidden_layers
    for name, slot in hf_to_ours(config, prefix=TEXT_ONLY_PREFIX).items():
        count = prod(slot.shape)
        kept = num_moments(slot.parameter)
        if len(slot.shape) > 1:
            sharded += count
            moments[kept] += count
        else:
            replicated += count
            replicated_moments += kept * count
        if name.startswith("model.layers."):
            layers[int(name.split(".")[2])] += count
    own = (ceil(sharded / num_chips) + replicated) * parameter_bytes
    own_moments = sum(kept * ceil(count / num_chips) for kept, count in moments.items())
    return StateBytes(
        parameters=own,
        moments=(own_moments + replicated_moments) * parameter_bytes,
        gradients=own,
        gathered_layer=max(layers) * compute_bytes,
        gathered_embedding=config.vocab_size * config.hidden_size * compute_bytes,
    )


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        require_count(name, value)
