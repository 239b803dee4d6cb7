"""Writes checkpoints beside the training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from train.checkpoint.manifest import Manifest
from train.checkpoint.store import CheckpointStore
from train.checkpoint.tensors import write
from train.exit_codes import StorageFailure
from train.hosts import Hosts


class Saver:
    """One checkpoint at a time, written by a thread of its own from copies in host memory."""

    def __init__(
        self, store: CheckpointStore, hosts: Hosts, keep: int, tell: Callable[[str], None]
    ) -> None:
        """`keep` as `CheckpointStore.retire`; `tell` gets a line for each checkpoint."""
        self._store, self._hosts, self._keep, self._tell = store, hosts, keep, tell
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._running is not None and not self._running.done()

    @property
    def has_failed(self) -> bool:
        """Whether the last one could not be written: `wait` raises why."""
        return bool(self._running and self._running.done() and self._running.exception())

    def start(self, manifest: Manifest, copies: dict[str, object]) -> None:
        """Begins to write. `wait` for the one before first."""
        assert self._running is None
        self._running = self._thread.submit(self._write, manifest, copies)

    def wait(self) -> None:
        """Returns when nothing is being written. Raises StorageFailure if it could not be."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def _write(self, manifest: Manifest, copies: dict[str, object]) -> None:
        store, step = self._store, manifest.step
        try:
            records = self._hosts.gather(write(store.begin(step), copies, self._hosts))
            files = {name: record for host in records for name, record in host.items()}
            self._finish(replace(manifest, files=files))
        except Exception as error:
            raise self._failure(step, error) from error
        self._tell(f"checkpoint of step {step}: {store.folder(step)}")
        try:
            if self._hosts.is_first:
                store.retire(self._keep)
        except Exception as error:
            raise StorageFailure(
                f"an old checkpoint could not be removed from {store.address} ({_reason(error)}); "
                f"that of step {step} is whole. See to it, then run the same command again"
            ) from error

    def _finish(self, manifest: Manifest) -> None:
        """The first host does it, and all know how it went."""
        failure = None
        if self._hosts.is_first:
            try:
                self._store.finish(manifest.step, manifest)
            except Exception as error:
                failure = error
        if any(self._hosts.gather(failure is not None)):
            raise failure or OSError("another host could not finish it")

    def _failure(self, step: int, error: Exception) -> StorageFailure:
        last = "none is there yet"
        try:
            if self._hosts.is_first:
                self._store.abandon(step)
            if steps := self._store.steps():
                last = f"the last good one is {self._store.folder(steps[-1])}"
        except OSError:
            logging.getLogger(__name__).debug("no answer from a failing store", exc_info=True)
            last = "and the place does not answer"
        return StorageFailure(
            f"the checkpoint of step {step} could not be written to {self._store.address} "
            f"({_reason(error)}); {last}. Make room or give another --checkpoint.folder, then run "
            "the same command again"
        )


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
