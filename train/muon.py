"""Muon: hidden matrices move along their momentum made orthogonal, all else as with AdamW.

Every singular value of a step is about one, so directions that few tokens ask for move as far as
others (Jordan et al., https://kellerjordan.github.io/posts/muon/). The step is scaled by
0.2 sqrt(max(rows, columns)), which gives it about the root mean square of AdamW's: learning rate
and weight decay mean the same for both (Liu et al., "Muon is scalable for LLM training",
https://arxiv.org/abs/2502.16982).

On a mesh: a matrix is iterated whole. Experts lie whole on devices where the mesh divides their
number, and nothing moves; other matrices are gathered in the compute dtype, every device iterates
all of them and keeps its part, which costs it a tenth of the 26B's FLOPs and no other collective.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from train.optim import AdamW, Direction
from train.sharding import is_hidden_matrix

_FUSED = "*gate_up*"
"""Two matrices, one above the other."""
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 (Jordan et al.): five turns bring singular values from 0.003 on
to between 0.68 and 1.13."""
_NUM_ITERATIONS = 5

Layout = Callable[[Tensor], Tensor]
"""A value -> the same, with its layout on the mesh stated."""


def _anywhere(tensor: Tensor) -> Tensor:
    return tensor


def orthogonal(matrices: Tensor, whole: Layout = _anywhere) -> Tensor:
    """The nearest orthogonal matrices, roughly: U V^T of the singular value decomposition of each
    of [..., m, n], with singular values of about one; a matrix of zeros stays one.

    Newton-Schulz iterations in the dtype given, on the smaller of both Gram matrices; norms are at
    least float32. `whole` is applied to each iterate.
    """
    wide = torch.promote_types(matrices.dtype, torch.float32)
    norm = matrices.to(wide).square().sum((-2, -1), keepdim=True).sqrt()
    x = (matrices / norm.clamp(min=1e-20)).to(matrices.dtype)
    is_upright = x.shape[-2] > x.shape[-1]
    first, third, fifth = _QUINTIC
    for _ in range(_NUM_ITERATIONS):
        x = whole(x)
        gram = x.mT @ x if is_upright else x @ x.mT
        factor = third * gram + fifth * (gram @ gram)
        x = first * x + (x @ factor if is_upright else factor @ x)
    return x


class Muon(AdamW):
    """Muon with Nesterov momentum for hidden matrices; the rest as AdamW, same schedule, clipping,
    guards and decay."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        *arguments: Any,
        dtype: torch.dtype = torch.bfloat16,
        whole: Callable[[str, Tensor], Layout] = lambda name, parameter: _anywhere,
        **options: Any,
    ) -> None:
        """As AdamW's. `dtype` is that of the iterations; `whole(name, parameter)` states that
        matrices stacked as the parameter, the last of the stack's dimensions first, are whole."""
        super().__init__(parameters, *arguments, **options)
        self.dtype = dtype
        matrices = self.moments.get("momentum", ())
        self.whole = {name: whole(name, self.parameters[name]) for name in matrices}

    def _kinds(self, name: str) -> tuple[str, ...]:
        return ("momentum",) if is_hidden_matrix(name) else super()._kinds(name)

    def _direction(self, name: str, grad: Tensor, corrections: tuple[Tensor, Tensor]) -> Direction:
        if not is_hidden_matrix(name):
            return super()._direction(name, grad, corrections)
        decay = self.config.momentum
        momentum = decay * self.moments["momentum"][name] + grad
        whole = self.whole[name]
        # Experts first: a batched product merges the dimensions before its last two, and the
        # partitioner keeps a merged dimension apart only where the first of them is.
        x = whole((grad + decay * momentum).to(self.dtype).movedim(-3, 0).clone())
        # Apart, not as one more dimension: torch_xla shards no tensor of more than five.
        pieces = x.chunk(2, -2) if fnmatchcase(name, _FUSED) else (x,)
        scale = 0.2 * max(pieces[0].shape[-2:]) ** 0.5
        update = torch.cat([orthogonal(piece, whole) for piece in pieces], -2)
        return {"momentum": momentum}, scale * update.movedim(0, -3).to(torch.float32)
