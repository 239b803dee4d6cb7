"""Attention and its gradient in plain torch, one block of queries at a time."""

import torch
from torch import Tensor

BLOCK = 512
"""Queries whose scores exist at once: memory is [B, N, BLOCK, S], not [B, N, S, S]."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, segment_ids: Tensor | None, *, window: int | None
) -> tuple[Tensor, Tensor]:
    """[B, S, N, H], [B, S, G, H] twice -> out [B, S, N, H] of q.dtype, log-sum-exp [B, N, S]; see
    `pallas_ops.attention.op.attention`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    batch, length, num_heads, _ = q.shape
    lse = q.new_empty(batch, num_heads, length, dtype=_wide(q))
    for rows, cols in _bands(length, window):
        scores = _scores(q[:, rows], k[:, cols])
        scores.masked_fill_(_hidden(rows, cols, window, segment_ids, q.device), float("-inf"))
        row_lse = scores.logsumexp(-1)
        weights = (scores - row_lse[..., None]).exp()
        values = v[:, cols].to(weights.dtype)
        out[:, rows] = torch.einsum("bgrst,btgh->bsgrh", weights, values).flatten(2, 3).to(q.dtype)
        lse[:, :, rows] = row_lse.flatten(1, 2)
    return out, lse


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    segment_ids: Tensor | None,
    *,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention`'s first result: dq, dk, dv, each rounded once.

    The kernels' delta is rowsum(dout * out) of the rounded `out`; here the exact sum is free.
    """
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (x.new_zeros(x.shape, dtype=_wide(x)) for x in (k, v))
    groups = (k.shape[2], -1)
    for rows, cols in _bands(q.shape[1], window):
        scores = _scores(q[:, rows], k[:, cols])
        row_lse = lse[:, :, rows].unflatten(1, groups)
        weights = (scores - row_lse[..., None]).exp()
        weights.masked_fill_(_hidden(rows, cols, window, segment_ids, q.device), 0)
        queries, grads = (x[:, rows].to(weights.dtype).unflatten(2, groups) for x in (q, dout))
        keys, values = (x[:, cols].to(weights.dtype) for x in (k, v))
        dv[:, cols] += torch.einsum("bgrst,bsgrh->btgh", weights, grads)
        dweights = torch.einsum("bsgrh,btgh->bgrst", grads, values)
        delta = (weights * dweights).sum(-1, keepdim=True)
        dscores = weights * (dweights - delta)
        dq[:, rows] = torch.einsum("bgrst,btgh->bsgrh", dscores, keys).flatten(2, 3).to(q.dtype)
        dk[:, cols] += torch.einsum("bgrst,bsgrh->btgh", dscores, queries)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _bands(length: int, window: int | None):
    """Slices of queries, and of the keys that any of them may see."""
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        yield slice(start, stop), slice(0 if window is None else max(0, start - window + 1), stop)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """[B, s, N, H], [B, t, G, H] -> [B, G, N / G, s, t]."""
    queries = q.to(_wide(q)).unflatten(2, (k.shape[2], -1))
    return torch.einsum("bsgrh,btgh->bgrst", queries, k.to(queries.dtype))


def _hidden(
    rows: slice,
    cols: slice,
    window: int | None,
    segment_ids: Tensor | None,
    device: torch.device,
) -> Tensor:
    """bool [s, t], or [B, 1, 1, s, t] with segments."""
    query = torch.arange(rows.start, rows.stop, device=device)
    key = torch.arange(cols.start, cols.stop, device=device)
    ahead = query[:, None] - key
    hidden = ahead < 0
    if window is not None:
        hidden = hidden | (ahead >= window)
    if segment_ids is None:
        return hidden
    other = segment_ids[:, rows, None] != segment_ids[:, None, cols]
    return (hidden | other)[:, None, None]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
