"""Attention of one layer: projections, per-head norms, rotary embedding, grouped-query softmax.

Both layer types normalise queries, keys and values per head and use scores q.k with no further
scale. Global layers have no value projection: their values are the raw key projection, before the
key's norm and rotation, so that one rsqrt serves both norms.
"""

from functools import partial

import torch
from torch import Tensor, nn

from pallas_ops import attention, norm_rope
from torch_gemma4.config import Gemma4Config, LayerSpec
from torch_gemma4.execution import Execution, wide
from torch_gemma4.linear import Linear
from torch_gemma4.norm import RMSNorm, rms_norm, rms_norms
from torch_gemma4.rope import apply_rope


def visible(
    length: int, window: int | None, segment_ids: Tensor | None, device: torch.device
) -> Tensor:
    """Which keys a query may read: bool [S, S], or [B, 1, 1, S, S] with `segment_ids` [B, S].

    Key j is visible to query i if j <= i, i - j < window and both are of one segment. A query
    always sees itself, so no row of scores is empty.
    """
    index = torch.arange(length, dtype=torch.int32, device=device)
    distance = index[:, None] - index
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    if segment_ids is None:
        return mask
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return (mask & same)[:, None, None]


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None, segment_ids: Tensor | None
) -> Tensor:
    """softmax(q k^T) v for q [B, S, N, H] and k, v [B, S, G, H] -> [B, S, N, H].

    Query head n reads key head n // (N / G), by shape and without repeated keys. Scores and softmax
    are at least float32 (bfloat16 scores of normed 256-wide heads overflowed elsewhere); the
    probabilities are cast to v's dtype.
    """
    num_kv_heads = k.shape[2]
    q = q.unflatten(2, (num_kv_heads, -1)).to(wide(q.dtype))  # [B, S, G, N/G, H]
    scores = torch.einsum("bsgqh,btgh->bgqst", q, k.to(q.dtype))
    mask = visible(q.shape[1], window, segment_ids, q.device)
    scores = torch.where(mask, scores, float("-inf"))
    probs = scores.softmax(dim=-1).to(v.dtype)
    return torch.einsum("bgqst,btgh->bsgqh", probs, v).flatten(2, 3)


class Attention(nn.Module):
    """x [B, S, D], already normed -> [B, S, D]. Parameters: `q_proj` [N H, D], `k_proj` [G H, D],
    `v_proj` [G H, D] unless values are keys, `o_proj` [D, N H], `q_norm` and `k_norm` [H]."""

    def __init__(self, config: Gemma4Config, spec: LayerSpec, execution: Execution) -> None:
        super().__init__()
        self.spec = spec
        self.execution = execution
        self.eps = config.rms_norm_eps
        query_dim = config.num_attention_heads * spec.head_dim
        kv_dim = spec.num_kv_heads * spec.head_dim
        dim = config.hidden_size
        linear = partial(Linear, bias=config.attention_bias, execution=execution)
        self.q_proj = linear(dim, query_dim)
        self.k_proj = linear(dim, kv_dim)
        self.v_proj = None if spec.k_eq_v else linear(dim, kv_dim)
        self.o_proj = linear(query_dim, dim)
        self.q_norm = RMSNorm(spec.head_dim, self.eps)
        self.k_norm = RMSNorm(spec.head_dim, self.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segment_ids: Tensor | None) -> Tensor:
        heads = (-1, self.spec.head_dim)
        q = self.q_proj(x).unflatten(-1, heads)
        k = self.k_proj(x).unflatten(-1, heads)
        v = k if self.v_proj is None else self.v_proj(x).unflatten(-1, heads)
        seen = {"window": self.spec.window, "segment_ids": segment_ids}
        if self.execution.attention == "kernel":
            options = {"eps": self.eps, "sharding": self.execution.sharding}
            q = norm_rope(q, self.q_norm.weight, cos, sin, **options)
            v = norm_rope(v, None, None, None, **options)
            k = norm_rope(k, self.k_norm.weight, cos, sin, **options)
            out = attention(q, k, v, sharding=self.execution.sharding, **seen)
        else:
            q = apply_rope(self.q_norm(q), cos, sin)
            if self.v_proj is None:
                k, v = rms_norms(k, (self.k_norm.weight, None), self.eps)
            else:
                k, v = self.k_norm(k), rms_norm(v, None, self.eps)
            out = attend(q, apply_rope(k, cos, sin), v, **seen)
        return self.o_proj(out.flatten(-2))
