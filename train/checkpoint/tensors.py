"""Tensors of the mesh to files and back, by torch.distributed.checkpoint.

Each host writes the shards its own devices hold, once each, and reads the parts its devices need,
whatever the mesh was that wrote them. Checksums are taken as bytes pass, not read back.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import PurePosixPath

import torch
import torch.distributed.checkpoint as dist_cp
import torch_xla
import torch_xla.distributed.spmd as xs
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import (
    FileSystem,
    FsspecReader,
    FsspecWriter,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch_xla.experimental.distributed_checkpoint import (
    SPMDLoadPlanner,
    SPMDSavePlanner,
    _helpers,
)

from train.checkpoint.manifest import FileRecord
from train.checkpoint.pieces import ignore_known_warnings
from train.hosts import Hosts


def host_copy(tensors: dict[str, Tensor]) -> dict[str, object]:
    """The shards of this host's devices, copied to its memory: what `write` takes. Waits for the
    devices. CPU tensors are cloned."""
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    placed = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "xla"}
    copies: dict[str, object] = _helpers._sharded_cpu_state_dict(placed)
    for copy in copies.values():
        if isinstance(copy, _helpers._CpuShards):
            # Replicas of a shard (the data axis) would be written once each.
            copy.shards = [shard for shard in copy.shards if shard.replica_id == 0]
    return copies | {name: tensor.clone() for name, tensor in tensors.items() if name not in placed}


def write(folder: str, copies: dict[str, object], hosts: Hosts) -> dict[str, FileRecord]:
    """Writes what `host_copy` took into `folder`; returns what this host wrote. All hosts call it.
    Raises what went wrong here, or else on another host."""
    ignore_known_warnings()
    writer = FsspecWriter(
        folder,
        sync_files="://" not in folder,
        # Importing jax's torch device makes the writer look for streams where there are none.
        per_thread_copy_ahead=0,
    )
    files = writer.fs = _RecordingFiles()
    files.init_path(folder)
    try:
        dist_cp.save(
            copies,
            storage_writer=writer,
            planner=SPMDSavePlanner(),
            process_group=hosts.background,
            no_dist=hosts.count == 1,
        )
    except CheckpointException as error:
        # torch.save forgets why its stream failed, and says that a position is wrong.
        raise files.failure or next(iter(error.failures.values()))[0] from error
    return files.records


def read(
    folder: str, tensors: dict[str, Tensor], hosts: Hosts, place: Callable[[Tensor], Tensor]
) -> None:
    """`fill` from what `write` left in `folder`."""
    fill(FsspecReader(folder), tensors, hosts, place)


def fill(
    reader: dist_cp.StorageReader,
    tensors: dict[str, Tensor],
    hosts: Hosts,
    place: Callable[[Tensor], Tensor],
) -> None:
    """Fills `tensors` with what `reader` has under their names. All hosts call it.

    Those split over the mesh stay as they lie, and each shard is filled in place; others get what
    `place` makes of a CPU tensor, which lies as the training step leaves it, so that resuming
    compiles no program of its own. CPU tensors are filled in place.
    """
    ignore_known_warnings()
    on_mesh = [name for name, tensor in tensors.items() if tensor.device.type == "xla"]
    if on_mesh:
        # A tensor still to be computed has no layout yet.
        torch_xla.sync(wait=True)
    whole = [n for n in on_mesh if not _helpers._is_sharded_tensor(xs.wrap_if_sharded(tensors[n]))]
    buffers = {name: tensor.detach() for name, tensor in tensors.items()}
    buffers |= {n: torch.empty(tensors[n].shape, dtype=tensors[n].dtype) for n in whole}
    dist_cp.load(
        dict(buffers),
        storage_reader=reader,
        planner=SPMDLoadPlanner(),
        process_group=hosts.background,
        no_dist=hosts.count == 1,
    )
    for name in whole:
        tensors[name].data = place(buffers[name])


@torch.no_grad()
def reshape_into(
    tensors: dict[str, Tensor], others: dict[str, Tensor], lay: Callable[[str, Tensor], Tensor]
) -> None:
    """Fills those of `tensors` that `others` names with its values, in their order; they lie as
    before, which `lay` states."""
    for name, other in others.items():
        tensors[name].copy_(other.reshape(tensors[name].shape))
        lay(name, tensors[name])
    if any(other.device.type == "xla" for other in others.values()):
        torch_xla.sync()  # else the first step would be another program than the rest


def stored_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in `folder`."""
    metadata = FsspecReader(folder).read_metadata()
    return {name: tuple(entry.size) for name, entry in metadata.state_dict_metadata.items()}


class _RecordingFiles(FileSystem):
    """Files whose size and digest are known as soon as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, FileRecord] = {}
        self.failure: Exception | None = None

    @contextmanager
    def create_stream(self, path: str, mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashing = _HashingStream(stream)
            try:
                yield hashing  # type: ignore[misc]
            finally:
                self.failure = self.failure or hashing.failure
            self.records[PurePosixPath(path).name] = hashing.record()

    def rename(self, path: str, new_path: str) -> None:
        super().rename(path, new_path)
        old, new = PurePosixPath(path).name, PurePosixPath(new_path).name
        self.records[new] = self.records.pop(old)


class _HashingStream:
    """What torch.save and the writer need of a stream."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream, self._size = stream, 0
        self._digest = blake2b(digest_size=16)
        self.failure: Exception | None = None

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        self._size += len(data)
        try:
            return self._stream.write(data)
        except Exception as error:
            self.failure = error
            raise

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()

    def record(self) -> FileRecord:
        return FileRecord(self._size, self._digest.hexdigest())
