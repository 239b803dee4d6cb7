"""A run's first weights from a folder of Hugging Face safetensors.

The folder is read as if it were a checkpoint: each of its tensors is a piece of one of our stacked
parameters, and torch.distributed.checkpoint finds out which pieces, and which rows of them, the
shards of this host's devices need. One parameter is filled after the other, so a host holds its
share of one, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from torch_gemma4.config import TRAINING_FIELDS, Gemma4Config
from torch_gemma4.hf import open_weights
from torch_gemma4.hf_names import Slot

if TYPE_CHECKING:
    from torch_gemma4.model import Gemma4ForCausalLM
    from train.config import RunConfig
    from train.hosts import Hosts


def refuse_unfit_weights(config: RunConfig) -> None:
    """Raises ValueError if `config.init_from` holds another model than the run's, or does not hold
    it whole. Reads headers alone."""
    folder = config.init_from
    # One model can be written in several ways; that of a config.json is one.
    model = Gemma4Config.from_hf(config.model.to_hf_dict())
    try:
        theirs = Gemma4Config.from_hf_file(folder)
        differences = [
            _difference(field.name, getattr(model, field.name), getattr(theirs, field.name))
            for field in fields(model)
            if field.name not in TRAINING_FIELDS
            and getattr(model, field.name) != getattr(theirs, field.name)
        ]
        if differences:
            raise ValueError(
                f"{folder} holds another model: {'; '.join(differences)}. Give --model_from "
                f"{folder} to train the one it holds"
            )
        open_weights(model, folder)
    except ValueError as error:
        raise ValueError(f"init_from: {error}") from None


def load_weights(
    config: RunConfig, model: Gemma4ForCausalLM, hosts: Hosts, place: Callable[[Tensor], Tensor]
) -> None:
    """Fills the parameters of `model` where they lie; `place` as in `train.checkpoint.tensors`.
    All hosts call it, and see the same folder. Raises ValueError as `open_weights` before it reads
    any."""
    from train.checkpoint.tensors import fill

    reader = _HuggingFaceReader(config.model, config.init_from)
    for name, parameter in model.named_parameters():
        fill(reader, {name: parameter}, hosts, place)


def _difference(name: str, here: object, there: object) -> str:
    if isinstance(here, int | float | str | None) and isinstance(there, int | float | str | None):
        return f"model.{name} = {here!r} here, {there!r} there"
    return f"model.{name}"  # lists of layers are longer than what is said of them


class _HuggingFaceReader(StorageReader):
    """A Hugging Face folder as storage of our parameters, a chunk a tensor."""

    def __init__(self, config: Gemma4Config, folder: str) -> None:
        self._reader, slots = open_weights(config, folder)
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        self._tensors = {}
        for name, slot in slots.items():
            offsets, sizes = map(torch.Size, slot.box)
            chunks.setdefault(slot.parameter, []).append(ChunkStorageMetadata(offsets, sizes))
            self._tensors[slot.parameter, offsets] = (name, slot)
        self._metadata = Metadata(
            {
                parameter: TensorStorageMetadata(TensorProperties(), _extent(parts), parts)
                for parameter, parts in chunks.items()
            }
        )

    def read_metadata(self) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._read(item).view(target.shape))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem) -> Tensor:
        index = item.storage_index
        name, slot = self._tensors[index.fqn, index.offset]
        rank = len(slot.shape)  # dimensions before it are of layers, of which it has one
        starts, lengths = item.storage_offsets[-rank:], item.lengths[-rank:]
        if slot.split:
            return self._halves(name, slot, starts, lengths)
        if slot.part_shape[0] == slot.shape[0]:
            part = slot.ours(self._reader.rows(name, starts[0], starts[0] + lengths[0]))
            starts = (0, *starts[1:])
        else:
            part = slot.ours(self._reader.tensor(name))
        for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def _halves(
        self, name: str, slot: Slot, starts: tuple[int, ...], lengths: tuple[int, ...]
    ) -> Tensor:
        """A box of [2, E * A/2, B], as `Slot.split` keeps experts; only those in it are read."""
        num_experts, num_rows, _ = slot.part_shape
        halves = []
        for half in range(starts[0], starts[0] + lengths[0]):
            row = half * num_experts * num_rows // 2 + starts[1]
            begin, end = row // num_rows, -(-(row + lengths[1]) // num_rows)
            part = slot.ours(self._reader.rows(name, begin, end)).flatten(0, 1)
            halves.append(part.narrow(0, row - begin * num_rows, lengths[1]))
        return torch.stack(halves).narrow(2, starts[2], lengths[2])

    # What this storage has no use for.

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


def _extent(chunks: list[ChunkStorageMetadata]) -> torch.Size:
    """Shape of what the chunks make up."""
    ends = [[o + s for o, s in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in chunks]
    return torch.Size(map(max, zip(*ends, strict=True)))
