"""What a stream needs of grain: packing a lane, and making batches ahead. Imports grain (and so
jax): import this late, as `train.data.batches.import_grain` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from train.data.batches import import_grain
from train.data.packing import Sequence

grain = import_grain()


class _Counted(grain.IterDataset):
    """An iterator as a grain data set; its state is how much was taken, and cannot be set."""

    def __init__(self, make: Callable[[], Iterator]) -> None:
        super().__init__()
        self._make = make

    def __iter__(self) -> grain.DatasetIterator:
        return _CountedIterator(self._make())


class _CountedIterator(grain.DatasetIterator):
    def __init__(self, iterator: Iterator) -> None:
        super().__init__()
        self._iterator, self._taken = iterator, 0

    def __next__(self):
        self._taken += 1
        return next(self._iterator)

    def get_state(self) -> dict[str, int]:
        return {"taken": self._taken}

    def set_state(self, state: dict[str, int]) -> None:
        raise NotImplementedError("a stream goes on by reading up to a sample (StreamSource)")


def packed(
    documents: Callable[[], Iterator[dict[str, np.ndarray]]], sequence_length: int
) -> Iterator[Sequence]:
    """Sequences of endless `documents`, each input_ids and labels [n]: concatenated, then cut every
    S tokens."""
    lengths = {"input_ids": sequence_length, "labels": sequence_length}
    for element in grain.experimental.ConcatThenSplitIterDataset(
        _Counted(documents), length_struct=lengths
    ):
        yield {
            "input_ids": element["input_ids"],
            "labels": element["labels"],
            "segment_ids": element["input_ids_segment_ids"],
        }


def prefetched(make: Callable[[], Iterator], size: int) -> Iterator:
    """The iterator that `make` returns, run `size` elements ahead in a thread."""
    ahead = grain.experimental.ThreadPrefetchIterDataset(_Counted(make), prefetch_buffer_size=size)
    return iter(ahead)
