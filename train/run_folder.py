"""Where a run's files are, and who may write them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from train.metrics import create_run_directory

if TYPE_CHECKING:
    from train.config import RunConfig
    from train.hosts import Hosts


def checkpoint_address(config: RunConfig, name: str) -> str:
    """Address of the checkpoints of the run in folder `name`."""
    return f"{(config.checkpoint.folder or config.log.dir).rstrip('/')}/{name}/checkpoints"


def begins(config: RunConfig) -> bool:
    """Whether the run has no checkpoint of its own to go on from."""
    from train.checkpoint.store import CheckpointStore

    if config.resume == "never" or not config.checkpoint.is_on:
        return True
    return not CheckpointStore(checkpoint_address(config, config.name)).steps()


def finished_line(config: RunConfig) -> str | None:
    """What to say if the run has no step left to do, else None."""
    from train.checkpoint.store import CheckpointStore

    if config.resume == "never" or not config.checkpoint.is_on:
        return None
    store = CheckpointStore(checkpoint_address(config, config.name))
    steps = store.steps()
    if not steps or steps[-1] < config.steps:
        return None
    return (
        f"{config.name} is finished: step {steps[-1]} of {config.steps} is in "
        f"{store.folder(steps[-1])}. More --steps go on from there; another --name, or --resume "
        "never, begins anew"
    )


@contextmanager
def run_folder(config: RunConfig, hosts: Hosts) -> Iterator[Path]:
    """The run's folder with its config.json, held for this process; the system lets go of it when
    the process ends, however that is. Hosts but the first have a folder of their own in it. Raises
    ValueError for a place that cannot be written, and if another process holds the folder, in which
    nothing is changed then."""
    made = str(create_run_directory(config)) if hosts.is_first else ""
    directory = Path(hosts.gather(made)[0])
    if not hosts.is_first:
        directory /= f"host-{hosts.rank}"
        directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{directory} is in use by a running process ({file.read().strip()}): wait for it, "
                "stop it, or give another --name"
            ) from None
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        if hosts.is_first:
            (directory / "config.json").write_text(config.to_json() + "\n")
        yield directory
