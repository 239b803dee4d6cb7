"""Which experts a token goes to, and how the router is judged.

All of it is float32 (float64 for float64 models) whatever the compute dtype: in bfloat16 about 3 %
of tokens would pick other experts. There is no sort, gather or scatter on [T, E]: choices are made
and values fetched by comparing with an index and summing, which vector units do at once.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torch_gemma4.execution import Execution
from torch_gemma4.linear import Linear, unset
from torch_gemma4.scales import spread


class Routing(NamedTuple):
    """What the router says about T tokens."""

    logits: Tensor
    """[T, E], at least float32."""
    probs: Tensor
    """[T, E], their softmax."""
    expert_ids: Tensor
    """[T, K] int32, by falling probability; equal ones by rising index."""
    weights: Tensor
    """[T, K], probabilities of the chosen, renormalised to sum 1, times per_expert_scale."""
    chosen: Tensor
    """[T, K, E] bool, expert_ids as one-hot rows."""


class RouterStatistics(NamedTuple):
    """One layer's judgement of its router. `load_balance` and `router_z` carry gradients. Every
    position counts, padding too: it is routed, and takes expert rows, like any other. All four are
    means or sums over sequences of one length, so equal micro-batches average (or add) exactly."""

    load_balance: Tensor
    """[1], E sum_e density_e proxy_e averaged over sequences, where density is the share of a
    sequence's T K choices that fell on e and proxy its mean probability. 1 when uniform, up to E
    when collapsed. Shazeer et al. 2017; Fedus et al. 2021, equation 4."""
    router_z: Tensor
    """[1], mean over tokens of logsumexp(logits)^2. Zoph et al., "ST-MoE", 2022, equation 5."""
    expert_load: Tensor
    """[E], rows each expert received."""
    router_entropy: Tensor
    """[1], mean over tokens of the entropy of probs, in nats; log E when undecided."""


def top_k(probs: Tensor, k: int) -> Tensor:
    """Indices int32 [T, K] of the k largest of non-negative `probs` [T, E] in falling order; of
    equals the lower index comes first, as in a stable sort.

    K rounds of maximum, lowest index that attains it, and strike-out. A row of NaN yields the last
    index, so that indices stay in range and the NaN shows in the weights.
    """
    last = probs.shape[-1] - 1
    index = torch.arange(last + 1, dtype=torch.int32, device=probs.device)
    remaining, picks = probs.detach(), []
    for _ in range(k):
        is_best = remaining == remaining.amax(-1, keepdim=True)
        pick = torch.where(is_best, index, last).amin(-1, keepdim=True)
        remaining = torch.where(index == pick, -1.0, remaining)
        picks.append(pick)
    return torch.cat(picks, dim=-1)


class Router(nn.Module):
    """z [T, D] -> Routing, where z is the residual's RMS norm times `input_scale()` in at least
    float32. Parameters: `proj` [E, D], `scale` [D], `per_expert_scale` [E]."""

    def __init__(
        self, hidden_size: int, num_experts: int, top_k_experts: int, execution: Execution
    ) -> None:
        super().__init__()
        self.top_k_experts = top_k_experts
        self.proj = Linear(hidden_size, num_experts, execution=execution)
        self.scale = unset(hidden_size)
        self.per_expert_scale = unset(num_experts)

    def input_scale(self, dtype: torch.dtype) -> Tensor:
        """[D] or [n, D] in `dtype`: the norm's scale with D^(-1/2), for an input of unit length."""
        return self.scale.to(dtype) * self.scale.shape[-1] ** -0.5

    def forward(self, z: Tensor) -> Routing:
        logits = self.proj(z)
        probs = logits.softmax(dim=-1)
        expert_ids = top_k(probs, self.top_k_experts)
        index = torch.arange(probs.shape[-1], dtype=torch.int32, device=z.device)
        chosen = expert_ids[..., None] == index  # [T, K, E]
        weights = torch.where(chosen, probs[:, None], 0.0).sum(-1)
        scale = spread(self.per_expert_scale.to(probs.dtype), chosen)
        scale = torch.where(chosen, scale, 0.0).sum(-1)
        weights = weights / weights.sum(-1, keepdim=True) * scale
        return Routing(logits, probs, expert_ids, weights, chosen)


def router_statistics(routing: Routing, num_sequences: int) -> RouterStatistics:
    """Losses and loads of a routing of B equally long sequences, tokens in row-major order."""
    num_experts = routing.probs.shape[-1]
    by_sequence = (num_sequences, -1)
    # float32 counts are exact below 2^24 rows.
    counts = routing.chosen.unflatten(0, by_sequence).sum((1, 2), dtype=torch.float32)  # [B, E]
    density = counts / counts.sum(-1, keepdim=True)
    proxy = routing.probs.unflatten(0, by_sequence).mean(1)
    log_z = routing.logits.logsumexp(-1, keepdim=True)
    entropy = -(routing.probs * (routing.logits - log_z)).detach().sum(-1)
    return RouterStatistics(
        load_balance=num_experts**2 * (density * proxy).mean()[None],
        router_z=log_z.square().mean()[None],
        expert_load=counts.sum(0),
        router_entropy=entropy.mean()[None],
    )
