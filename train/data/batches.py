"""Sequences to batches: in which order, which rows on which host, from where on after a restart.

Sample g of a run is one number for all hosts and for good: batch i of B rows holds samples
[first + i * B, first + (i + 1) * B), whoever makes them. The state of a run's data is therefore the
next sample, and it does not know how many hosts or chips there were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, Self

import numpy as np

from train.data.packing import IGNORED, Sequence, Sequences

_ENDLESS = 2**31  # epochs; grain's own endless repeat overflows in batches of one
Batch = dict[str, np.ndarray]
"""int32 arrays [B, S] of the global batch: input_ids, labels, segment_ids, and positions if these
restart. Rows of other hosts are padding: no device of this one ever sees them."""


@dataclass(frozen=True)
class HostRows:
    """Which rows of each global batch a host makes: those that its devices take."""

    parts: tuple[int, ...] = (0,)
    """Positions on the mesh of the host's devices; the device at position p takes the p-th part."""
    num_parts: int = 1
    """Devices of the whole mesh; each takes an equal part of the rows."""

    @classmethod
    def of_process(cls, process_index: int, process_count: int) -> HostRows:
        """For hosts that own equal parts, one after the other."""
        return cls((process_index,), process_count)

    def of(self, batch_size: int) -> list[int]:
        """Row numbers, rising. Raises ValueError if the parts would not be equal."""
        size, rest = divmod(batch_size, self.num_parts)
        if rest:
            raise ValueError(
                f"data.batch_size = {batch_size}: give a multiple of {self.num_parts}, the devices "
                "it is split over"
            )
        return [part * size + i for part in sorted(self.parts) for i in range(size)]


class SampleSource(Protocol):
    """Where batches come from; `order` is all that samples depend on, as JSON."""

    order: dict[str, Any]

    def batches(self, first: int, batch_size: int, rows: list[int]) -> Iterator[list[Sequence]]:
        """For each batch from sample `first` on, the sequences of these rows of it."""
        ...


class Batches:
    """Endless global batches with the rows of one host filled in. `state_dict` may be taken
    between any two; `load_state_dict` must come before the first."""

    def __init__(
        self,
        source: SampleSource,
        shape: tuple[int, int],
        rows: HostRows,
        finish: Callable[[Batch], Batch],
    ) -> None:
        """Batches [B, S] = `shape`. `finish` has the last word on each, and may refuse it."""
        self._source, self._shape, self._finish = source, shape, finish
        self._rows = rows.of(shape[0])
        self._next_sample = 0
        self._iterator: Iterator[list[Sequence]] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            self._iterator = self._source.batches(self._next_sample, self._shape[0], self._rows)
        sequences = next(self._iterator)
        self._next_sample += self._shape[0]
        return self._finish(fill(sequences, self._rows, self._shape))

    def close(self) -> None:
        """Ends what reads ahead. The last call."""
        if self._iterator is not None:
            self._iterator.close()
            # grain's closes itself once more when it goes, and cannot at the end of the process.
            self._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """Where the data is, as JSON: the sample that comes next, and what the order depends on."""
        return {"next_sample": self._next_sample, "order": self._source.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken, whatever the batch size and the hosts. Raises ValueError
        if the order has changed since."""
        assert self._iterator is None, "the state is loaded before the first batch"
        ours, theirs = self._source.order, state["order"]
        for name in theirs | ours:
            if ours.get(name) != theirs.get(name):
                raise ValueError(
                    f"data.{name} = {ours.get(name)!r}: the checkpoint's data has "
                    f"{theirs.get(name)!r}, so its position in it means nothing here. Give the "
                    "data it was trained on, or start a new run from its weights"
                )
        self._next_sample = int(state["next_sample"])


def fill(sequences: list[Sequence], rows: list[int], shape: tuple[int, int]) -> Batch:
    """A batch [B, S] with `sequences` in `rows`; other rows are padding."""
    batch = {}
    for name in ("input_ids", "labels", "segment_ids"):
        padding = IGNORED if name == "labels" else 0
        batch[name] = np.full(shape, padding, dtype=np.int32)
        for row, sequence in zip(rows, sequences, strict=True):
            batch[name][row] = sequence[name]
    return batch


def restarted_positions(segment_ids: np.ndarray) -> np.ndarray:
    """int32 [B, S]: 0, 1, ... in every run of equal `segment_ids` [B, S]."""
    at = np.arange(segment_ids.shape[1], dtype=np.int32)
    begins = np.diff(segment_ids, axis=1, prepend=-1) != 0
    return at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)


class ShuffledSource:
    """Each epoch is another order of all sequences; a batch may end one and begin the next."""

    def __init__(
        self, sequences: Sequences, *, seed: int, prefetch: int, order: dict[str, Any]
    ) -> None:
        self.sequences, self._seed, self._prefetch = sequences, seed, prefetch
        self.order = order

    def batches(self, first: int, batch_size: int, rows: list[int]) -> Iterator[list[Sequence]]:
        grain = import_grain()
        samples = grain.MapDataset.source(self.sequences).shuffle(seed=self._seed).repeat(_ENDLESS)
        mine = _Mine(samples, first, batch_size, rows)
        batches = grain.MapDataset.source(mine).batch(len(rows), batch_fn=list)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=self._prefetch)
        return iter(batches.to_iter_dataset(options))


@dataclass(frozen=True)
class _Mine:
    """The samples of some rows of every batch, as one list."""

    samples: Sequences
    first: int
    batch_size: int
    rows: list[int]

    def __len__(self) -> int:
        return (len(self.samples) - self.first) // self.batch_size * len(self.rows)

    def __getitem__(self, index: int) -> Sequence:
        batch, row = divmod(index, len(self.rows))
        return self.samples[self.first + batch * self.batch_size + self.rows[row]]


def import_grain() -> ModuleType:
    """grain, which imports jax, though without starting a backend. On a TPU host torch_xla must
    take the chips first, so this is only called for the first batch."""
    # grain warns through absl, at import, that the pinned jaxlib cannot profile grain's worker
    # processes. There are none here.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import grain
    finally:
        logger.setLevel(level)
    return grain
