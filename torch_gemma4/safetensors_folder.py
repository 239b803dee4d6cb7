"""Folders of safetensors files, read and written one tensor at a time.

Layout as in transformers: `model.safetensors`, or `model-0000i-of-0000n.safetensors` beside
`model.safetensors.index.json`, which maps every tensor to its file. Published shards are 50 GB, so
neither side ever holds a whole shard. File format: https://github.com/huggingface/safetensors.
"""

import json
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Float types by their safetensors name; a model's weights have no other."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class FolderReader:
    """The tensors of a folder, without their data until asked.

    Opens every file's header at once, so that a missing, truncated or contradictory file is found
    before anything is read. Raises ValueError naming the file and the remedy.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        expected = self._expected_files()
        self._handles: dict[str, Any] = {}
        files: dict[str, str] = {}
        for file in sorted(set(expected.values())) or [SINGLE_FILE]:
            handle = self._open(file)
            for name in handle.keys():
                if name in files:
                    self._fail(f"{file} repeats tensor {name} of {files[name]}; keep one of them")
                files[name] = file
                self._handles[name] = handle
        for name, file in expected.items():
            if files.get(name) != file:
                self._fail(f"{INDEX_FILE} puts {name} into {file}, which lacks it; download both")
        unlisted = sorted(set(files) - set(expected)) if expected else []
        if unlisted:
            name = unlisted[0]
            self._fail(f"{files[name]} holds {name}, which {INDEX_FILE} lacks; download both")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return tuple(self._handles[name].get_slice(name).get_shape())

    def dtype_code(self, name: str) -> str:
        """Safetensors name of a tensor's dtype, from the header."""
        return self._handles[name].get_slice(name).get_dtype()

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, perhaps lying in the mapped file at an address no matmul expects:
        copy it before computing with it."""
        return self._handles[name].get_tensor(name)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """[start:stop] of a tensor, which alone is read."""
        return self._handles[name].get_slice(name)[start:stop]

    def _expected_files(self) -> dict[str, str]:
        """File of each tensor by the index; empty for a single file."""
        index, single = self.folder / INDEX_FILE, self.folder / SINGLE_FILE
        if index.exists() and single.exists():
            self._fail(f"has both {SINGLE_FILE} and {INDEX_FILE}; remove the one not meant")
        if single.exists():
            return {}
        if not index.exists():
            self._fail(f"has neither {SINGLE_FILE} nor {INDEX_FILE}; give a model folder")
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._fail(f"{INDEX_FILE} has no readable weight_map ({error!r}); download it again")
        if not isinstance(weight_map, dict) or not weight_map:
            self._fail(f"{INDEX_FILE} has no file names in its weight_map; download it again")
        for name, file in weight_map.items():
            if not isinstance(file, str):
                self._fail(f"{INDEX_FILE} puts {name} into {file!r}, no file; download it again")
        return weight_map

    def _open(self, file: str) -> Any:
        path = self.folder / file
        if not path.is_file():
            self._fail(f"shard {file} is missing; download it")
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            self._fail(f"{file} is truncated or damaged ({error}); download it again")

    def _fail(self, problem: str) -> NoReturn:
        raise ValueError(f"{self.folder}: {problem}") from None


@dataclass(frozen=True)
class TensorEntry:
    """What the header of a file says of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def split_shards(entries: Iterable[TensorEntry], max_bytes: int) -> list[list[TensorEntry]]:
    """Entries by file, as huggingface_hub splits a state dict: in order, each file filled while its
    data stays within `max_bytes`; a larger tensor gets a file of its own, before the one that is
    being filled."""
    shards: list[list[TensorEntry]] = []
    current: list[TensorEntry] = []
    room = max_bytes
    for entry in entries:
        if entry.num_bytes > max_bytes:
            shards.append([entry])
            continue
        if entry.num_bytes > room:
            shards.append(current)
            current, room = [], max_bytes
        current.append(entry)
        room -= entry.num_bytes
    return [*shards, current] if current else shards


class FolderWriter:
    """A folder being filled, a tensor at a time and in any order.

    The files are made at once, with their headers and room for all data, so a full disk is found
    before anything is computed: one file, or shards of up to `max_shard_bytes` of data and their
    index. Files come out byte for byte as the safetensors library writes them.
    """

    def __init__(
        self,
        folder: Path,
        entries: Sequence[TensorEntry],
        *,
        max_shard_bytes: int,
        total_parameters: int,
    ) -> None:
        """`folder` exists. `total_parameters` is only recorded. Raises OSError."""
        shards = split_shards(entries, max_shard_bytes)
        count = len(shards)
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            files = [SINGLE_FILE]
        self.folder = folder
        self._maps: list[mmap.mmap] = []
        self._places: dict[str, tuple[TensorEntry, mmap.mmap, int]] = {}
        for file, shard in zip(files, shards, strict=True):
            self._open(folder / file, shard)
        if count == 1:
            return
        index = {
            "metadata": {
                "total_parameters": total_parameters,
                "total_size": sum(entry.num_bytes for entry in entries),
            },
            "weight_map": {
                entry.name: file
                for file, shard in zip(files, shards, strict=True)
                for entry in shard
            },
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX_FILE).write_text(text, encoding="utf-8")

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of an entry's shape and dtype whose memory is its place in the file: what is
        copied into it is written."""
        entry, data, start = self._places[name]
        count = torch.Size(entry.shape).numel()
        flat = torch.frombuffer(data, dtype=entry.dtype, count=count, offset=start)
        return flat.view(entry.shape)

    def flush(self) -> None:
        """Returns when everything is on disk."""
        for data in self._maps:
            data.flush()

    def _open(self, path: Path, entries: Sequence[TensorEntry]) -> None:
        # The library's order: wide dtypes first, which keeps every tensor aligned, then by name.
        ordered = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in ordered:
            start, end = end, end + entry.num_bytes
            header[entry.name] = {
                "dtype": _CODES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [start, end],
            }
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        encoded = len(encoded).to_bytes(8, "little") + encoded
        with path.open("w+b") as file:
            file.write(encoded)
            file.flush()
            # Writing to a mapped hole of a full disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, len(encoded) + end)
            os.fsync(file.fileno())
            data = mmap.mmap(file.fileno(), len(encoded) + end)
        self._maps.append(data)
        for entry in entries:
            start = len(encoded) + header[entry.name]["data_offsets"][0]
            self._places[entry.name] = (entry, data, start)
