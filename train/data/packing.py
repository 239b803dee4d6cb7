"""A row of documents to sequences of S tokens, any of them at hand without those before it, so that
a position in the data is one number.

A sequence is a dict of int32 arrays [S]:

    input_ids     tokens; 0 on padding.
    segment_ids   1, 2, ... for the documents of this sequence, 0 on padding. Attention and loss
                  stay inside one segment.
    labels        input_ids, not shifted, with IGNORED on padding, on prompts, and on the first
                  token of every segment, which the token before it (another document's) must not
                  predict.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

import numpy as np

from train.data.token_row import TokenRow

IGNORED = -100
"""Label of a position that carries no loss."""
Sequence = dict[str, np.ndarray]


class Sequences(Protocol):
    """What batches are drawn from."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sequence: ...


class SplitSequences:
    """Sequence i is tokens [i * S, (i + 1) * S) of the row: nothing is padded but the end of the
    last. A document that crosses a cut goes on in the next sequence without its past."""

    def __init__(self, row: TokenRow, sequence_length: int) -> None:
        self._row, self._sequence_length = row, sequence_length

    def __len__(self) -> int:
        return -(-self._row.num_tokens // self._sequence_length)

    def __getitem__(self, index: int) -> Sequence:
        start = index * self._sequence_length
        stop = min(start + self._sequence_length, self._row.num_tokens)
        return _pad(_cut(self._row, start, stop), self._sequence_length)


class FitSequences:
    """Whole documents side by side, each put where it leaves least room (best fit, in the order of
    the row); only a document longer than S is cut, every S tokens."""

    def __init__(self, row: TokenRow, sequence_length: int) -> None:
        self._row, self._sequence_length = row, sequence_length
        self._bins = best_fit(row.ends, sequence_length)

    def __len__(self) -> int:
        return len(self._bins)

    def __getitem__(self, index: int) -> Sequence:
        pieces = [_cut(self._row, start, stop) for start, stop in self._bins[index]]
        joined = {name: np.concatenate([p[name] for p in pieces]) for name in pieces[0]}
        lengths = [len(piece["input_ids"]) for piece in pieces]
        joined["segment_ids"] = np.repeat(np.arange(1, len(pieces) + 1), lengths)
        return _pad(joined, self._sequence_length)


def best_fit(ends: np.ndarray, capacity: int) -> list[list[tuple[int, int]]]:
    """Pieces (start, stop) of documents that end at `ends`, in bins of at most `capacity`."""
    bins: list[list[tuple[int, int]]] = []
    by_room: dict[int, list[int]] = {}  # bins by the tokens still free in them
    rooms: list[int] = []  # its keys that have a bin, sorted
    start = 0
    for end in ends.tolist():
        for first in range(start, end, capacity):
            piece = (first, min(first + capacity, end))
            size = piece[1] - piece[0]
            found = bisect_left(rooms, size)
            if found == len(rooms):
                free, number = capacity, len(bins)
                bins.append([])
            else:
                free = rooms[found]
                number = by_room[free].pop()
                if not by_room[free]:
                    del rooms[found]
            bins[number].append(piece)
            room = free - size
            if room and not by_room.setdefault(room, []):
                insort(rooms, room)
            if room:
                by_room[room].append(number)
        start = end
    return bins


def _cut(row: TokenRow, start: int, stop: int) -> Sequence:
    """Tokens [start, stop) of the row, without padding."""
    at = np.arange(start, stop)
    input_ids = row.tokens[start:stop].astype(np.int64)
    first = int(np.searchsorted(row.ends, start, side="right"))
    last = int(np.searchsorted(row.ends, stop - 1, side="right"))
    ends, scored_from = row.ends[first : last + 1], row.scored_from[first : last + 1]
    document = np.searchsorted(ends, at, side="right")
    begins = np.diff(document, prepend=-1) != 0
    ignored = begins | (at < scored_from[document])
    return {
        "input_ids": input_ids,
        "labels": np.where(ignored, IGNORED, input_ids),
        "segment_ids": document + 1,
    }


def _pad(sequence: Sequence, length: int) -> Sequence:
    padded = {}
    for name, values in sequence.items():
        padding = IGNORED if name == "labels" else 0
        padded[name] = np.full(length, padding, dtype=np.int32)
        padded[name][: len(values)] = values
    return padded
