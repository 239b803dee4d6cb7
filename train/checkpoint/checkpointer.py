"""When a run saves, and what it goes on from."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from train.checkpoint.compatibility import changed_fields, refuse_other_model
from train.checkpoint.layout import layout_of, stored_form
from train.checkpoint.manifest import Damaged, Manifest, installed_versions
from train.checkpoint.saver import Saver
from train.checkpoint.store import CheckpointStore, find_checkpoint
from train.checkpoint.tensors import host_copy, read, reshape_into, stored_shapes
from train.exit_codes import StorageFailure

if TYPE_CHECKING:
    from train.config import RunConfig
    from train.hosts import Hosts

_RNG = "rng/torch"


class DataPosition(Protocol):
    """What is saved of an iterator over batches."""

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is, as JSON can say it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes there. Raises ValueError for data that has no such position."""


class Checkpointer:
    """The checkpoints of one run.

    checkpointer = Checkpointer(config, address, hosts, tensors, data, place, lay, tell)
    step = checkpointer.restore()             steps done: 0 without a checkpoint
    ... after each step:
    due = checkpointer.is_due(step)           all hosts must agree on it (Hosts.any)
    checkpointer.save(step)                   writes in a thread
    checkpointer.wait()                       before the process ends

    `tensors` are the live ones of the run: parameters, moments, counters. They are read at `save`
    and filled at `restore`; `place` puts a whole CPU tensor onto the mesh, and `lay(name, tensor)`
    states that a new tensor lies there as the one of that name does. The CPU's random state is
    saved with them; `tell` gets a line for a person.
    """

    def __init__(
        self,
        config: RunConfig,
        address: str,
        hosts: Hosts,
        tensors: dict[str, Tensor],
        data: DataPosition,
        place: Callable[[Tensor], Tensor],
        lay: Callable[[str, Tensor], Tensor],
        tell: Callable[[str], None],
    ) -> None:
        self._config, self._hosts, self._tensors, self._data = config, hosts, tensors, data
        self._place, self._lay, self._tell = place, lay, tell
        self._store = CheckpointStore(address)
        self._saver = Saver(self._store, hosts, config.checkpoint.keep, tell)
        self._last_save = time.monotonic()

    # Saving

    @property
    def has_failed(self) -> bool:
        """Whether a checkpoint could not be written: `wait` then raises StorageFailure."""
        return self._saver.has_failed

    def is_permanent(self, step: int) -> bool:
        """Whether the checkpoint of `step` is to be kept for good."""
        every = self._config.checkpoint.every_steps
        return step == self._config.steps or bool(every and step % every == 0)

    def is_due(self, step: int) -> bool:
        """Whether either clock says to save after `step`. A temporary checkpoint waits for the one
        being written; a permanent one does not."""
        if self.is_permanent(step):
            return True
        minutes = self._config.checkpoint.every_minutes
        is_time = minutes > 0 and time.monotonic() - self._last_save >= 60 * minutes
        return is_time and not self._saver.is_busy

    def save(self, step: int) -> None:
        """Copies the state after `step` to the host and begins to write it. Raises StorageFailure
        if the checkpoint before could not be written."""
        manifest = Manifest(
            step=step,
            permanent=self.is_permanent(step),
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            layout=layout_of(self._config.model),
            config=self._config.to_dict(),
            data=self._data.state_dict(),
            versions=installed_versions(),
            files={},
        )
        self._saver.wait()  # the host holds one copy at a time
        self._last_save = time.monotonic()
        self._saver.start(manifest, host_copy(self._tensors | {_RNG: torch.get_rng_state()}))

    def wait(self) -> None:
        """Returns when every checkpoint is on disk. Raises StorageFailure if one is not."""
        self._saver.wait()

    # Restoring

    def restore(self) -> int:
        """Takes up the newest checkpoint that is whole; returns its step, or 0 without any.

        One whose files are damaged is set aside with a line that says so, and the one before is
        tried. Raises StorageFailure if all of them are, ValueError for a checkpoint of another
        model or weight layout (nothing is touched then), for `resume = "required"` without a
        checkpoint and for "never" with one.
        """
        self._refuse_private_folder()
        if self._hosts.is_first:
            self._store.clear_unfinished()
        steps = self._store.steps()
        if steps and self._config.resume == "never":
            raise ValueError(
                f"resume = 'never': {self._store.address} has checkpoints of another run. Give "
                "another --name or --checkpoint.folder"
            )
        for step in reversed(steps):
            try:
                manifest = self._verified(self._store, step)
            except Damaged as damage:
                self._set_aside(step, damage)
                continue
            self._load(self._store, manifest)
            return step
        if damaged := self._store.damaged():
            raise StorageFailure(
                f"every checkpoint in {self._store.address} is damaged ({', '.join(damaged)}). Put "
                "a good copy back, or remove them or give another --name to start over"
            )
        if self._config.resume == "required":
            raise ValueError(
                f"resume = 'required': there is no finished checkpoint in {self._store.address}. "
                "Give the --name and --checkpoint.folder of the run to go on with, or --resume auto"
            )
        if self._config.checkpoint.start_from:
            return self._start_from(self._config.checkpoint.start_from)
        return 0

    def _refuse_private_folder(self) -> None:
        """Every host writes a part, so all must see the same folder."""
        if self._hosts.count == 1:
            return
        if self._hosts.is_first:
            self._store.leave_sign()
        self._hosts.gather(None)
        if not all(self._hosts.gather(self._store.sees_sign())):
            raise ValueError(
                f"checkpoint.folder: {self._store.address} is not the same folder on all "
                f"{self._hosts.count} hosts. Give a place that they share, such as gs://bucket/runs"
            )

    def _start_from(self, address: str) -> int:
        store, step = find_checkpoint("checkpoint.start_from", address)
        try:
            manifest = self._verified(store, step)
        except Damaged as damage:
            raise StorageFailure(f"the checkpoint {address} is damaged: {damage}") from damage
        self._load(store, manifest)
        return step

    def _verified(self, store: CheckpointStore, step: int) -> Manifest:
        """The manifest of `step`, when its files are whole. Hosts share the reading."""
        found: str | None = None
        manifest = None
        try:
            manifest = store.manifest(step)
            refuse_other_model(store.folder(step), manifest, self._config)
            names = sorted(manifest.files)[self._hosts.rank :: self._hosts.count]
            store.verify(step, {name: manifest.files[name] for name in names})
        except Damaged as damage:
            found = str(damage)
        damages = [text for text in self._hosts.gather(found) if text]
        if damages:
            raise Damaged(damages[0])
        assert manifest is not None
        return manifest

    def _set_aside(self, step: int, damage: Damaged) -> None:
        where = self._store.folder(step)
        if self._hosts.is_first:
            where = self._store.set_aside(step)
        self._hosts.gather(None)
        self._tell(f"the checkpoint of step {step} is damaged ({damage}); set aside: {where}")

    def _load(self, store: CheckpointStore, manifest: Manifest) -> None:
        folder = store.folder(manifest.step)
        rng = torch.get_rng_state()
        tensors = self._tensors | {_RNG: rng}
        model, layout = self._config.model, manifest.layout
        forms = {
            name: stored_form(name, tuple(tensor.shape), model.num_experts, layout)
            for name, tensor in tensors.items()
        }
        shapes = dict(forms.values())
        stored = stored_shapes(folder)
        if stored != shapes:
            names = stored.keys() | shapes.keys()
            first = min(name for name in names if stored.get(name) != shapes.get(name))
            raise ValueError(
                f"{folder} holds other tensors than this run, first {first}: "
                f"{stored.get(first, 'absent')} there, {shapes.get(first, 'absent')} here. "
                "Give another --name, or the program that wrote it: "
                f"{manifest.versions.get('torch-gemma4')}"
            )
        self._data.load_state_dict(manifest.data)
        others = {
            name: self._lay(form, tensors[name].new_zeros(shape))
            for name, (form, shape) in forms.items()
            if form != name
        }
        filled = {forms[name][0]: tensor for name, tensor in (tensors | others).items()}
        read(folder, filled, self._hosts, self._place)
        reshape_into(tensors, others, self._lay)
        torch.set_rng_state(rng)
        self._tell(f"going on from step {manifest.step}: {folder} ({manifest.written})")
        if others:
            self._tell(
                f"its weight layout {layout!r} is converted to {layout_of(model)!r}: no bit changed"
            )
        changes = changed_fields(manifest.config, self._config.to_dict())
        if changes:
            self._tell(f"with other settings than it was written with: {', '.join(changes)}")
