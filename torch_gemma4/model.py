"""The whole decoder: embedding, layers, final norm, head, and the training loss."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from torch_gemma4.config import Gemma4Config
from torch_gemma4.decoder import DecoderStack
from torch_gemma4.embedding import Embedding
from torch_gemma4.execution import Execution, wide
from torch_gemma4.linear import Linear
from torch_gemma4.loss import IGNORE_INDEX, shift_labels, soft_cap, tiled_cross_entropy
from torch_gemma4.norm import RMSNorm
from torch_gemma4.router import RouterStatistics


class LossOutput(NamedTuple):
    """What a step optimises and what it reports; scalars of at least float32 unless noted. Parts
    are unweighted, `loss` is their weighted sum. Router fields are None without experts."""

    loss: Tensor
    """cross_entropy + sum over the parts below of the config's weight times part."""
    cross_entropy: Tensor
    """Summed over valid labels, divided by num_items."""
    num_valid: Tensor
    """int32, valid labels of this batch."""
    z_loss: Tensor
    """Of (log sum exp logits)^2, like cross_entropy."""
    load_balance_loss: Tensor | None
    """Mean over layers, divided by num_micro_batches."""
    router_z_loss: Tensor | None
    """Mean over layers, divided by num_micro_batches."""
    expert_load: Tensor | None
    """[L, E], rows each expert received."""
    router_entropy: Tensor | None
    """[L], nats."""


class Gemma4ForCausalLM(nn.Module):
    """Gemma 4 text decoder.

    Parameters are NaN after construction: fill them with `init_parameters` or from a checkpoint.
    Building under `torch.device("meta")` works, as nothing else is held. Names: `embedding.weight`
    [V, D], `stack.segments.{j}.*` [P, C, ...] (see `DecoderStack`), `final_norm.weight` [D], and
    `lm_head.weight` [V, D] only where the head is not tied.
    """

    def __init__(self, config: Gemma4Config, execution: Execution | None = None) -> None:
        super().__init__()
        self.config = config
        self.execution = execution = execution or Execution()
        dtype, dim = execution.precision.params, config.hidden_size
        self.embedding = Embedding(config.vocab_size, dim, dtype, execution.constrain)
        self.stack = DecoderStack(config, execution)
        self.final_norm = RMSNorm(dim, config.rms_norm_eps, dtype=dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(dim, config.vocab_size, dtype=dtype)

    def forward(
        self,
        input_ids: Tensor,
        *,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, RouterStatistics | None]:
        """Final hidden states [B, S, D] in the compute dtype, and per-layer router statistics.

        input_ids [B, S]. Attention stays inside equal `segment_ids` [B, S]. `attention_mask`
        [B, S], 1 for real tokens, makes padding a segment of its own: real tokens do not see it,
        and what a padding position holds has no meaning. `positions` [B, S] or [S] for rotary
        embedding, 0 .. S-1 by default. Padding is routed like any token, see `RouterStatistics`.

        Raises ValueError for shapes that do not fit.
        """
        return self._hidden(input_ids, self._table(), segment_ids, attention_mask, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, S, D] -> soft-capped logits [B, S, V] in at least float32."""
        logits = nn.functional.linear(hidden, self._head_weight().to(hidden.dtype))
        return soft_cap(logits.to(wide(hidden.dtype)), self.config.final_logit_softcapping)

    def loss(
        self,
        input_ids: Tensor,
        labels: Tensor,
        *,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        num_items: Tensor | int | None = None,
        num_micro_batches: int = 1,
    ) -> LossOutput:
        """Next-token loss. labels [B, S] are the input's own ids, shifted here; -100 is ignored (a
        packed batch marks each document's first token so).

        For gradient accumulation over n equal micro-batches, pass the valid labels of all of them
        as `num_items` (default: this batch's) and n as `num_micro_batches`; then the losses and
        gradients of the n calls add up to those of the joint batch. Nothing valid gives zero
        cross entropy and zero gradients of it.

        Raises ValueError for shapes that do not fit, or if num_loss_tiles does not divide S.
        """
        config, sharding = self.config, self.execution.sharding
        _check_integers("labels", labels, input_ids.shape)
        table = self._table()
        hidden, statistics = self._hidden(input_ids, table, segment_ids, attention_mask, positions)
        head = self._head_weight()
        if not config.tie_word_embeddings:
            table = self._cast(head)
        targets = shift_labels(labels)
        num_valid = (targets != IGNORE_INDEX).sum(dtype=torch.int32)
        sums = tiled_cross_entropy(
            hidden,
            head,
            table,
            targets,
            softcap=config.final_logit_softcapping,
            num_tiles=config.num_loss_tiles,
            num_shards=1 if sharding is None else sharding.num_row_shards,
            loop=self.execution.loop,
            constrain=self.execution.constrain,
        )
        count = num_valid if num_items is None else num_items
        count = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        cross_entropy, z_loss = (total / count for total in sums)
        parts = [(config.z_loss_weight, z_loss)]
        load_balance = router_z = None
        if statistics is not None:
            load_balance = statistics.load_balance.mean() / num_micro_batches
            router_z = statistics.router_z.mean() / num_micro_batches
            parts.append((config.load_balance_loss_weight, load_balance))
            parts.append((config.router_z_loss_weight, router_z))
        # A weight of zero leaves its part out of the graph, backward included.
        loss = sum((weight * part for weight, part in parts if weight), start=cross_entropy)
        return LossOutput(
            loss=loss,
            cross_entropy=cross_entropy,
            num_valid=num_valid,
            z_loss=z_loss,
            load_balance_loss=load_balance,
            router_z_loss=router_z,
            expert_load=None if statistics is None else statistics.expert_load,
            router_entropy=None if statistics is None else statistics.router_entropy.squeeze(-1),
        )

    def _hidden(
        self,
        input_ids: Tensor,
        table: Tensor,
        segment_ids: Tensor | None,
        attention_mask: Tensor | None,
        positions: Tensor | None,
    ) -> tuple[Tensor, RouterStatistics | None]:
        is_integer = input_ids.dtype in (torch.int32, torch.int64)
        if input_ids.ndim != 2 or not input_ids.numel() or not is_integer:
            raise ValueError(
                f"input_ids: {input_ids.dtype} {tuple(input_ids.shape)}; give int32 or int64 "
                "[B, S], at least one token"
            )
        shape, device = input_ids.shape, input_ids.device
        _check_integers("segment_ids", segment_ids, shape)
        _check_shape("attention_mask", attention_mask, shape)
        _check_shape("positions", positions, shape, shape[1:])
        if positions is None:
            positions = torch.arange(shape[1], dtype=torch.int32, device=device)
        if segment_ids is not None:
            segment_ids = segment_ids.to(torch.int32)
        if attention_mask is not None:
            segment_ids = torch.where(
                attention_mask != 0, 0 if segment_ids is None else segment_ids, _PADDING
            ).to(torch.int32)
        x = self.embedding(input_ids, table)
        x, statistics = self.stack(x, positions, segment_ids)
        return self.final_norm(x), statistics

    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.lm_head is None else self.lm_head.weight

    def _table(self) -> Tensor:
        return self._cast(self.embedding.weight)

    def _cast(self, weight: Tensor) -> Tensor:
        """A table in the compute dtype, without gradient: its readers send theirs to `weight`."""
        table = weight.detach().to(self.execution.precision.compute)
        return self.execution.constrain(table, "table")


_PADDING = -(2**31)
"""Segment of padding; no document has it."""


def segment_ids_from_positions(positions: Tensor) -> Tensor:
    """int32 [B, S] for `segment_ids` from Hugging Face position_ids [B, S]: a document starts
    wherever the position is not the previous one plus 1."""
    starts = positions[:, 1:] - positions[:, :-1] != 1
    return torch.nn.functional.pad(starts.to(torch.int32), (1, 0)).cumsum(1, dtype=torch.int32)


def _check_integers(name: str, tensor: Tensor | None, expected: torch.Size) -> None:
    _check_shape(name, tensor, expected)
    if tensor is not None and (tensor.is_floating_point() or tensor.dtype == torch.bool):
        raise ValueError(f"{name}: {tensor.dtype}; give integers, as input_ids")


def _check_shape(name: str, tensor: Tensor | None, *expected: torch.Size) -> None:
    if tensor is not None and tensor.shape not in expected:
        wanted = " or ".join(str(list(shape)) for shape in expected)
        raise ValueError(f"{name}: shape {list(tensor.shape)}; give {wanted}, as input_ids has")
