"""Whether the places a run writes to take what it writes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec

from train.doctor.finding import Finding
from train.tables import format_bytes

if TYPE_CHECKING:
    from train.config import RunConfig

LOG_CHECK = "log.dir"
CHECKPOINT_CHECK = "checkpoints"
_CONTENT = b"written by python -m train doctor"


def check_log_folder(config: RunConfig) -> Finding:
    """log.dir takes a file, and locks: a run holds its folder by one. What was made is removed."""
    folder = Path(config.log.dir)
    try:
        with _existing(folder), tempfile.TemporaryFile(dir=folder) as file:
            file.write(_CONTENT)
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return Finding(
            *(LOG_CHECK, "failed", f"{folder.absolute()}: {error.strerror}"),
            cure="give a folder of a local disk that you may write to as --log.dir, or mend its "
            "permissions",
        )
    return Finding(LOG_CHECK, "ok", f"{folder.absolute()} takes files and locks")


def check_checkpoint_folder(config: RunConfig) -> Finding:
    """checkpoint.folder, an address fsspec knows, gives back what is written there, and has room
    for a checkpoint where room can be asked for. What was made is removed."""
    from torch_gemma4.accounting import state_bytes

    if not config.checkpoint.is_on:
        return Finding(CHECKPOINT_CHECK, "not run", "checkpoints are off")
    address = (config.checkpoint.folder or config.log.dir).rstrip("/")
    size = state_bytes(config.model, 1, num_moments=config.optim.num_moments).persistent
    try:
        files, root = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        return Finding(
            *(CHECKPOINT_CHECK, "failed", f"{address}: {error}"),
            cure="install what is missing (gs:// needs pip install -e '.[gcs]'), or give a local "
            "folder as --checkpoint.folder",
        )
    is_local = "file" in files.protocol
    free = None
    try:
        with _existing(Path(root)) if is_local else contextlib.nullcontext():
            path = f"{root}/doctor-{os.uname().nodename}-{os.getpid()}"
            files.pipe_file(path, _CONTENT)
            content = files.cat_file(path)
            files.rm_file(path)
            if is_local:
                free = shutil.disk_usage(root).free
    except Exception as error:  # each kind of store has exceptions of its own
        return Finding(
            *(
                CHECKPOINT_CHECK,
                "failed",
                f"{address}: {getattr(error, 'strerror', None) or error}",
            ),
            cure="give this host (on Google Cloud, its service account and the VM's access scope) "
            "the right to write and remove there, or another place as --checkpoint.folder",
        )
    if content != _CONTENT:
        return Finding(
            *(CHECKPOINT_CHECK, "failed", f"{address} gives back other bytes than were written"),
            cure="do not train into it: give another place as --checkpoint.folder",
        )
    room = f"a checkpoint takes {format_bytes(size)}"
    if free is None:
        return Finding(CHECKPOINT_CHECK, "ok", f"{address} takes files; {room}")
    room = f"{format_bytes(free)} free, {room}"
    if free < size:
        return Finding(
            *(CHECKPOINT_CHECK, "failed", f"{address}: {room}"),
            cure="free some, or give a larger place as --checkpoint.folder",
        )
    return Finding(CHECKPOINT_CHECK, "ok", f"{address} takes files; {room}")


@contextlib.contextmanager
def _existing(folder: Path):
    """`folder`, made for as long as this lasts where it is not there."""
    missing = []
    for parent in (folder, *folder.parents):
        if parent.exists():
            break
        missing.append(parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()
