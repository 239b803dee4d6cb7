"""The folder that holds a run's checkpoints: names, finish marks, what is kept.

    step-00000300/           finished: checkpoint.json, which is written last, is there
    writing-step-00000400/   being written, or what a killed process left
    damaged-step-00000200/   its files are not what was written; set aside, never removed here

A local folder is written under its second name and renamed, which is one indivisible act. An object
store has no such rename, so there a checkpoint is written in place, and only its mark, one object,
tells that it is finished.
"""

from __future__ import annotations

import os
import re
from hashlib import blake2b

import fsspec
from fsspec.implementations.local import LocalFileSystem

from train.checkpoint.manifest import Damaged, FileRecord, Manifest

MARK = "checkpoint.json"
_SIGN = "shared-by-all-hosts"
_FINISHED = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"(?:writing-)?step-(\d+)")
_CHUNK = 2**24


class CheckpointStore:
    """Checkpoints under one address.

    One process a run changes it: on many hosts the first one does, the others write their files
    into the folder that `begin` names.
    """

    def __init__(self, address: str) -> None:
        """`address` is a folder, or what fsspec knows (gs://bucket/folder). Raises ValueError for
        an address of a kind whose library is not installed."""
        self.address = address.rstrip("/")
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"checkpoint.folder = {address!r}: {error}. Install what is missing (gs:// needs "
                "pip install -e '.[gcs]'), or give a local folder"
            ) from error
        self._is_local = isinstance(self._files, LocalFileSystem)

    def folder(self, step: int) -> str:
        """Address of the finished checkpoint of `step`."""
        return f"{self.address}/{_name(step)}"

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending."""
        steps = []
        for name in self._names():
            match = _FINISHED.fullmatch(name)
            if match and self._files.exists(self._path(name, MARK)):
                steps.append(int(match[1]))
        return sorted(steps)

    def damaged(self) -> list[str]:
        """Names of the folders set aside."""
        return sorted(name for name in self._names() if name.startswith("damaged-"))

    def begin(self, step: int) -> str:
        """Address of the folder to write the checkpoint of `step` into."""
        return f"{self.address}/{self._working_name(step)}"

    def finish(self, step: int, manifest: Manifest) -> None:
        """Makes what was written into `begin(step)` the checkpoint of `step`."""
        working = self._path(self._working_name(step))
        content = manifest.to_json().encode()
        if not self._is_local:
            self._files.pipe_file(f"{working}/{MARK}", content)
            return
        with open(f"{working}/{MARK}", "wb") as mark:
            mark.write(content)
            mark.flush()
            os.fsync(mark.fileno())
        os.rename(working, self._path(_name(step)))
        # Otherwise a power cut may undo the rename.
        descriptor = os.open(self._root, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def abandon(self, step: int) -> None:
        """Removes what was written into `begin(step)`, to make room."""
        self._remove(self._working_name(step))

    def clear_unfinished(self) -> None:
        """Removes what killed processes left."""
        finished = {_name(step) for step in self.steps()}
        for name in self._names():
            if _UNFINISHED.fullmatch(name) and name not in finished:
                self._remove(name)

    def retire(self, keep: int) -> None:
        """Removes temporary checkpoints but for those among the newest `keep`."""
        for step in self.steps()[:-keep]:
            try:
                is_permanent = self.manifest(step).permanent
            except Damaged:
                continue  # a matter for whoever loads it
            if not is_permanent:
                # The mark first: half a removal is an unfinished checkpoint.
                self._files.rm(self._path(_name(step), MARK))
                self._remove(_name(step))

    def manifest(self, step: int) -> Manifest:
        """Raises Damaged."""
        try:
            text = self._files.cat_file(self._path(_name(step), MARK)).decode()
        except UnicodeDecodeError as error:
            raise Damaged(f"{MARK} is not text") from error
        return Manifest.from_json(text)

    def verify(self, step: int, files: dict[str, FileRecord]) -> None:
        """Raises Damaged naming the first of `files` that is not what was written."""
        for name, record in files.items():
            path = self._path(_name(step), name)
            if not self._files.exists(path):
                raise Damaged(f"{name} is missing")
            size = self._files.size(path)
            if size != record.size:
                raise Damaged(f"{name} has {size:,} bytes of {record.size:,}")
            digest = blake2b(digest_size=16)
            with self._files.open(path, "rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
            if digest.hexdigest() != record.digest:
                raise Damaged(f"{name} does not agree with its checksum")

    def set_aside(self, step: int) -> str:
        """Renames a damaged checkpoint, so that it is neither loaded nor counted; returns its new
        address."""
        number, aside = 1, f"damaged-{_name(step)}"
        while self._files.exists(self._path(aside)):
            number += 1
            aside = f"damaged-{_name(step)}-{number}"
        self._files.mv(self._path(_name(step)), self._path(aside), recursive=True)
        return f"{self.address}/{aside}"

    def leave_sign(self) -> None:
        """Leaves a file by which others see that their folder is this one."""
        self._files.makedirs(self._root, exist_ok=True)
        self._files.touch(self._path(_SIGN))

    def sees_sign(self) -> bool:
        """Whether another's `leave_sign` was in this folder."""
        return self._files.exists(self._path(_SIGN))

    def _working_name(self, step: int) -> str:
        return f"writing-{_name(step)}" if self._is_local else _name(step)

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    def _names(self) -> list[str]:
        self._files.invalidate_cache()
        if not self._files.isdir(self._root):
            return []
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in self._files.ls(self._root, False)]

    def _remove(self, name: str) -> None:
        if self._files.exists(self._path(name)):
            self._files.rm(self._path(name), recursive=True)


def find_checkpoint(field: str, address: str) -> tuple[CheckpointStore, int]:
    """The store and the step of the finished checkpoint whose folder is `address`. Raises
    ValueError if there is none, naming `field`."""
    folder, _, name = address.rstrip("/").rpartition("/")
    store = CheckpointStore(folder or ".")
    steps = {_name(step): step for step in store.steps()}
    if name not in steps:
        raise ValueError(
            f"{field} = {address!r}: no finished checkpoint is there. Give a folder such as "
            "runs/NAME/checkpoints/step-00001000"
        )
    return store, steps[name]


def _name(step: int) -> str:
    return f"step-{step:08d}"
