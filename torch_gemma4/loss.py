"""Cross entropy over the vocabulary, a tile of the sequence at a time.

Logits [B, S, V] of a large vocabulary are the largest tensor of a training step, so they never
exist whole: forward makes and drops those of one tile, backward makes them again from the kept log
normaliser. Tiles cut the sequence and not the batch, which is what a mesh shards.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_gemma4.execution import Constrain, LayerLoop, keep_layout, python_loop, wide

IGNORE_INDEX = -100
"""Label of positions without a target, as in Hugging Face and torch."""


class CrossEntropySums(NamedTuple):
    """Sums over the positions whose label is not IGNORE_INDEX, scalars of at least float32."""

    cross_entropy: Tensor
    """Of -log p(label)."""
    log_z_squared: Tensor
    """Of (log sum exp logits)^2, for the z-loss."""


def shift_labels(labels: Tensor) -> Tensor:
    """labels [B, S] of the tokens themselves -> int32 [B, S], each position holding its successor's
    and the last IGNORE_INDEX: the length stays S, so tiles stay whole."""
    last = torch.full_like(labels[:, :1], IGNORE_INDEX)
    return torch.cat((labels[:, 1:], last), dim=1).to(torch.int32)


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap), or logits where cap is None."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _check_tiles(length: int, num_tiles: int) -> None:
    if length % num_tiles:
        divisors = [n for n in range(1, length + 1) if length % n == 0]
        raise ValueError(
            f"num_loss_tiles = {num_tiles}: does not divide the sequence length {length}; "
            f"use one of {', '.join(map(str, divisors))}"
        )


@dataclass(frozen=True)
class _TileLoss:
    """Forward of one tile, as a loop's body: adds to the sums [2] and returns log Z [B, s]."""

    softcap: float | None
    constrain: Constrain

    def __call__(self, sums, tile, constants):
        (table,) = constants
        h, y = self.constrain(tile["hidden"], "rows"), tile["labels"]
        logits = soft_cap(F.linear(h, table).to(sums.dtype), self.softcap)
        log_z = logits.logsumexp(-1)
        at_label = torch.where(_one_hot(y, logits), logits, 0.0).sum(-1)
        losses = torch.stack((log_z - at_label, log_z.square()))
        return sums + torch.where(y != IGNORE_INDEX, losses, 0.0).sum((1, 2)), (log_z,)


@dataclass(frozen=True)
class _TileGradient:
    """Backward of one tile: adds to the table's gradient [n, V, D], a part for each of the n shards
    of the batch, and returns the gradient of hidden [B, s, D]."""

    softcap: float | None
    constrain: Constrain

    def __call__(self, grad_table, tile, constants):
        table, grad_cross_entropy, grad_log_z_squared = constants
        h, y, log_z = self.constrain(tile["hidden"], "rows"), tile["labels"], tile["log_z"]
        z = log_z[..., None]
        logits = soft_cap(F.linear(h, table).to(z.dtype), self.softcap)
        grad = (logits - z).exp() * (grad_cross_entropy + 2 * z * grad_log_z_squared)
        grad = torch.where(_one_hot(y, logits), grad - grad_cross_entropy, grad)
        if self.softcap is not None:
            grad = grad * (1 - (logits / self.softcap).square())
        grad = torch.where(y[..., None] != IGNORE_INDEX, grad, 0.0).to(table.dtype)
        shards = (tensor.unflatten(0, (grad_table.shape[0], -1)) for tensor in (grad, h))
        partial = torch.einsum("nbsv,nbsd->nvd", *shards)
        grad_table = self.constrain(grad_table + partial.to(grad_table.dtype), "rows")
        return grad_table, (self.constrain(grad @ table, "rows"),)


class _TiledCrossEntropy(torch.autograd.Function):
    """`weight` is here for its gradient only: `table` is its value in the compute dtype. So tiles'
    contributions add up in float32 and reach the parameter unrounded. Each shard of the batch adds
    up its own, and the mesh sums them once at the end, not once a tile."""

    @staticmethod
    def forward(ctx, hidden, weight, table, labels, cap, num_tiles, num_shards, loop, constrain):
        sums = torch.zeros(2, dtype=wide(hidden.dtype), device=hidden.device)
        tiles = {"hidden": _tiles(hidden, num_tiles), "labels": _tiles(labels, num_tiles)}
        sums, (log_z,) = loop(_TileLoss(cap, constrain), sums, tiles, (table,))
        ctx.save_for_backward(hidden, table, labels, log_z)
        ctx.num_shards, ctx.weight_dtype = num_shards, weight.dtype
        ctx.loop, ctx.body = loop, _TileGradient(cap, constrain)
        return tuple(sums.unbind())

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_sums):
        hidden, table, labels, log_z = ctx.saved_tensors
        shape = (ctx.num_shards, *table.shape)
        grad_table = torch.zeros(shape, dtype=log_z.dtype, device=table.device)
        num_tiles = log_z.shape[0]
        tiles = {"hidden": _tiles(hidden, num_tiles), "labels": _tiles(labels, num_tiles)}
        tiles["log_z"] = log_z
        grad_table = ctx.body.constrain(grad_table, "rows")
        grad_table, (grad_hidden,) = ctx.loop(ctx.body, grad_table, tiles, (table, *grad_sums))
        grad_weight = ctx.body.constrain(grad_table.sum(0), "table_gradient").to(ctx.weight_dtype)
        return grad_hidden.transpose(0, 1).reshape(hidden.shape), grad_weight, *[None] * 7


def _tiles(tensor: Tensor, num_tiles: int) -> Tensor:
    """[B, S, ...] -> [num_tiles, B, s, ...]."""
    return tensor.unflatten(1, (num_tiles, -1)).transpose(0, 1)


def _one_hot(labels: Tensor, logits: Tensor) -> Tensor:
    """bool [B, s, V]: a comparison the compiler fuses, where a gather would be serial."""
    index = torch.arange(logits.shape[-1], dtype=labels.dtype, device=labels.device)
    return labels[..., None] == index


def tiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    table: Tensor,
    labels: Tensor,
    *,
    softcap: float | None,
    num_tiles: int,
    num_shards: int = 1,
    loop: LayerLoop = python_loop,
    constrain: Constrain = keep_layout,
) -> CrossEntropySums:
    """Summed losses of soft_cap(hidden table^T) against `labels`, tile by tile.

    hidden [B, S, D]; weight [V, D] is the parameter that gets the gradient, summed over tiles in at
    least float32; table is the same in hidden's dtype, without gradient; labels [B, S] as they are
    to be predicted (see `shift_labels`). Divide the sums by a count of labels, the global one where
    the batch is spread or accumulated. Nothing valid: zero sums and zero gradients. On a mesh,
    `num_shards` is the number of pieces that split B; `loop` runs the tiles one after another and
    `constrain` states layouts (`Execution`).

    Raises ValueError unless num_tiles divides S.
    """
    _check_tiles(hidden.shape[1], num_tiles)
    sums = _TiledCrossEntropy.apply(
        hidden, weight, table, labels, softcap, num_tiles, num_shards, loop, constrain
    )
    return CrossEntropySums(*sums)
