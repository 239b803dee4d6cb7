"""What a recomputation policy costs and saves, by arithmetic: FLOPs run again, bytes kept."""

from dataclasses import dataclass

from torch_gemma4.accounting import training_flops
from torch_gemma4.config import Gemma4Config
from torch_gemma4.layer_spec import LayerSpec

_NOT_RUN_AGAIN = {
    "full": (),
    "save_global_attention": ("global attention",),
    "save_attention": ("local attention", "global attention"),
}
"""Parts of `training_flops` whose results a policy keeps."""


@dataclass(frozen=True)
class RecomputeCost:
    """Of one chip and step."""

    flops: dict[str, int]
    """FLOPs run a second time by part. The head is always among them: the loss makes its logits
    anew, a tile at a time."""
    kept_bytes: int
    """What all layers keep for the backward pass: their inputs and what the policy adds to them."""

    @property
    def total_flops(self) -> int:
        """Of all parts."""
        return sum(self.flops.values())


def recompute_cost(
    config: Gemma4Config,
    policy: str,
    *,
    sequence_length: int,
    sequences_per_chip: int,
    micro_batches: int = 1,
    compute_bytes: int = 2,
) -> RecomputeCost:
    """Of `policy`, "none" or a `torch_gemma4.recompute.Policy`, for a step of `sequences_per_chip`
    sequences on a chip, of which a share of 1 / micro_batches is alive at a time."""
    table = training_flops(
        config, sequence_length=sequence_length, sequences_per_chip=sequences_per_chip
    )
    kept = [part.part for part in table.parts if part.part != "head"]
    kept = kept if policy == "none" else _NOT_RUN_AGAIN[policy]
    per_token = sum(_layer_bytes(config, spec, policy, compute_bytes) for spec in config.layers)
    return RecomputeCost(
        flops={part.part: part.forward for part in table.parts if part.part not in kept},
        kept_bytes=sequence_length * sequences_per_chip // micro_batches * per_token,
    )


def _layer_bytes(config: Gemma4Config, spec: LayerSpec, policy: str, compute_bytes: int) -> int:
    """Of one layer and token. "none" is what autograd keeps of products, norms and gates, without
    the scores of einsum attention."""
    width = config.hidden_size
    if policy == "none":
        heads = 2 * config.num_attention_heads + 2 * spec.num_kv_heads
        elements = 7 * width + heads * spec.head_dim + 3 * config.intermediate_size
        if config.enable_moe_block:
            elements += config.top_k_experts * (2 * width + 3 * config.moe_intermediate_size)
        return elements * compute_bytes
    kind = "global attention" if spec.window is None else "local attention"
    added = 0
    if kind in _NOT_RUN_AGAIN[policy]:
        # The result, and the log normaliser in float32.
        added = config.num_attention_heads * (spec.head_dim * compute_bytes + 4)
    return width * compute_bytes + added
