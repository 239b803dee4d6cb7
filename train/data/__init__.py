"""Text files to batches: find, read, split (files), bytes (tokenizer), sequences (packing).

    data = TextData.load(config)
    for batch in data.train_batches(start=0): ...     endless; batch i is the same in every run
    for batch in data.eval_batches(4): ...            the same few, of the same shape

A batch is a dict of int32 numpy arrays [B, S]: input_ids, labels, segment_ids (`PackedSequences`).
B is the global batch; every process makes all of it, and the mesh takes its rows.

grain shuffles, batches and prefetches. It imports jax, though without starting a backend; on a
TPU host torch_xla must still take the chips first, so grain is only imported when the first
training batch is asked for.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from train.data.files import find_files, read_documents, split
from train.data.packing import IGNORED, PackedSequences
from train.data.tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from train.config import DataConfig

__all__ = ["IGNORED", "Batch", "ByteTokenizer", "PackedSequences", "TextData"]

_ENDLESS = 2**31  # epochs; grain's own endless repeat overflows in batches of one
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class TextData:
    """A corpus, cut into training and held-out sequences."""

    config: "DataConfig"
    """Where it came from."""
    tokenizer: ByteTokenizer
    """Text to ids and back."""
    train: PackedSequences
    """Sequences of the training files."""
    held_out: PackedSequences | None
    """Sequences of the held-out files; None without any."""

    @classmethod
    def load(cls, config: "DataConfig") -> "TextData":
        """Reads all text. Raises ValueError for paths without text, and for text shorter than one
        sequence."""
        tokenizer = ByteTokenizer()
        files = find_files(config.path, config.pattern, config.skip)
        documents = read_documents(files, config.max_bytes)
        train, held_out = split(documents, config.eval_fraction)
        length = config.sequence_length
        packed = PackedSequences(train, length, tokenizer)
        if packed.num_tokens < length:
            raise ValueError(
                f"data.sequence_length = {length}: the training text has {packed.num_tokens} "
                "tokens in all. Give shorter sequences, or more text in --data.path"
            )
        return cls(
            config,
            tokenizer,
            packed,
            PackedSequences(held_out, length, tokenizer) if held_out else None,
        )

    def train_batches(self, start: int = 0) -> "TrainBatches":
        """Endless batches from number `start` on. Each epoch has an order of its own; a batch may
        end one epoch and begin the next."""
        grain = _import_grain()
        batches = (
            grain.MapDataset.source(self.train)
            .shuffle(seed=self.config.seed)
            .repeat(_ENDLESS)
            .batch(self.config.batch_size)
            .to_iter_dataset(
                grain.ReadOptions(num_threads=1, prefetch_buffer_size=self.config.prefetch)
            )
        )
        iterator = iter(batches)
        iterator.set_state({"next_index": start})
        return TrainBatches(iterator, self.config.batch_size)

    def eval_batches(self, num_batches: int) -> list[Batch]:
        """The first sequences of an order fixed by the seed, in batches of the training shape, as
        many as there are up to `num_batches`; the last is filled up with empty rows. Raises
        ValueError without held-out text."""
        if self.held_out is None:
            raise ValueError(
                "data.eval_fraction = 0 holds no text out: give a share, or --eval.every 0"
            )
        size = self.config.batch_size
        order = np.random.default_rng(self.config.seed).permutation(len(self.held_out))
        order = order[: num_batches * size]
        return [
            _stack([self.held_out[i] for i in order[start : start + size]], size)
            for start in range(0, len(order), size)
        ]


class TrainBatches:
    """Iterator over batches whose position is a number of sequences."""

    def __init__(self, iterator: Iterator[Batch], batch_size: int) -> None:
        self._iterator, self._batch_size = iterator, batch_size

    def __iter__(self) -> "TrainBatches":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def state_dict(self) -> dict[str, int]:
        """Sequences handed out so far, over all epochs."""
        return {"next_sequence": self._iterator.get_state()["next_index"] * self._batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Raises ValueError for a position inside a batch."""
        batches, rest = divmod(state["next_sequence"], self._batch_size)
        if rest:
            raise ValueError(
                f"data.batch_size = {self._batch_size}: {state['next_sequence']} sequences were "
                "used so far, no whole number of such batches: give a divisor of that"
            )
        self._iterator.set_state({"next_index": batches})


def _stack(rows: list[Batch], size: int) -> Batch:
    empty = {name: np.zeros_like(row) for name, row in rows[0].items()}
    empty["labels"] += IGNORED
    rows = rows + [empty] * (size - len(rows))
    return {name: np.stack([row[name] for row in rows]) for name in empty}


def _import_grain() -> ModuleType:
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
