"""Stored tensors piece by piece, without torch_xla: for uses elsewhere than on a mesh."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
import torch.distributed.checkpoint as dist_cp
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

Take = Callable[[str, torch.Size, Tensor], None]
"""(tensor's name, where in it the piece begins, the piece)."""


def read_pieces(folder: str, names: Iterable[str], take: Take) -> None:
    """Hands every stored piece of the tensors `names` in `folder` to `take`. A piece is what a
    device held; one at a time is in memory, while it is read twice."""
    ignore_known_warnings()
    dist_cp.load(
        {},
        storage_reader=FsspecReader(folder),
        planner=_PieceByPiece(names, take),
        no_dist=True,
    )


def ignore_known_warnings() -> None:
    """Of the pinned libraries about each other, and about what is meant so."""
    for message in (
        "torch.distributed is disabled, unavailable or uninitialized",
        "The function definition for SavePlanner.set_up_planner has been updated",
        "TypedStorage is deprecated",
        "Using a non-tuple sequence for multidimensional indexing is deprecated",
    ):
        warnings.filterwarnings("ignore", message)


class _PieceByPiece(LoadPlanner):
    def __init__(self, names: Iterable[str], take: Take) -> None:
        self._names, self._take = names, take

    def set_up_planner(
        self, state_dict: object, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._entries = {name: metadata.state_dict_metadata[name] for name in self._names}

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(
            [
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(name, chunk.offsets),
                    dest_offsets=torch.Size([0] * len(chunk.sizes)),
                    storage_index=MetadataIndex(name, chunk.offsets),
                    storage_offsets=torch.Size([0] * len(chunk.sizes)),
                    lengths=chunk.sizes,
                )
                for name, entry in self._entries.items()
                for chunk in entry.chunks
            ]
        )

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: object) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        dtype = self._entries[read_item.dest_index.fqn].properties.dtype
        return torch.empty(read_item.lengths, dtype=dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._take(read_item.dest_index.fqn, read_item.dest_index.offset, tensor)
