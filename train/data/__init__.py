"""Documents to batches: find and read (documents), ids (tokenizer, token_row, token_folder),
sequences (packing, synthetic), order and hosts (batches); sources puts them together.

    data = TextData.load(config.data, vocab_size=config.model.vocab_size)
    batches = data.train_batches(HostRows(...))       endless; batch i is the same in every run
    batches.state_dict(), batches.load_state_dict()   where it is: one sample number
    data.eval_set(4).batches                          the same few each time, of the same shape

grain orders, batches and prefetches. It imports jax, though without starting a backend; on a TPU
host torch_xla must still take the chips first, so grain is only imported when the first training
batch is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.data.batches import Batch, Batches, HostRows, SampleSource, fill, restarted_positions
from train.data.packing import IGNORED
from train.data.sources import HeldOut, open_source
from train.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from train.data.config import DataConfig

__all__ = ["IGNORED", "Batch", "Batches", "ByteTokenizer", "EvalSet", "HostRows", "TextData"]


@dataclass(frozen=True)
class EvalSet:
    """Batches to evaluate on."""

    batches: list[Batch]
    """Of the training shape, this host's rows filled in."""
    bytes_per_token: float
    """See `HeldOut`."""


@dataclass(frozen=True)
class TextData:
    """A corpus: samples to train on, and sequences to evaluate on."""

    config: DataConfig
    """Where it came from."""
    vocab_size: int
    """Of the model: every id is below it."""
    tokenizer: Tokenizer | None
    """Text to ids and back; None for synthetic ids."""
    train: SampleSource
    """What training batches are drawn from."""
    held_out: Callable[[int], HeldOut] | None
    """At most so many held-out sequences, the same ones each time; None without any."""

    @classmethod
    def load(cls, config: DataConfig, *, vocab_size: int) -> TextData:
        """Opens the source: reads all text of files, maps tokens, asks for a stream. Raises
        ValueError for what cannot be read, and for text shorter than one sequence."""
        tokenizer = None
        if config.source != "synthetic":
            tokenizer = load_tokenizer(config.tokenizer, vocab_size)
        train, held_out = open_source(config, tokenizer, vocab_size)
        return cls(config, vocab_size, tokenizer, train, held_out)

    def train_batches(self, rows: HostRows = HostRows()) -> Batches:
        """Endless global batches, `rows` of them filled in. A batch raises ValueError if it holds
        an id that the model does not have."""
        shape = (self.config.batch_size, self.config.sequence_length)
        return Batches(self.train, shape, rows, self._finish)

    def eval_set(self, num_batches: int, rows: HostRows = HostRows()) -> EvalSet:
        """Held-out batches, as many as there are up to `num_batches`; the last is filled up with
        empty rows. Raises ValueError without held-out text, and for an id that the model does not
        have."""
        if self.held_out is None:
            raise ValueError(_NOTHING_HELD_OUT[self.config.source])
        size, length = self.config.batch_size, self.config.sequence_length
        held_out = self.held_out(num_batches * size)
        batches = []
        for start in range(0, len(held_out.sequences), size):
            # A host without a row in the last batch still has to make one, of nothing.
            mine = [r for r in rows.of(size) if start + r < len(held_out.sequences)]
            sequences = [held_out.sequences[start + row] for row in mine]
            batches.append(self._finish(fill(sequences, mine, (size, length))))
        return EvalSet(batches, held_out.bytes_per_token)

    def _finish(self, batch: Batch) -> Batch:
        if batch["input_ids"].max() >= self.vocab_size:
            raise ValueError(
                f"data.path = {self.config.path}: a batch holds token {batch['input_ids'].max()}, "
                f"and model.vocab_size = {self.vocab_size}: the tokens were made for another "
                "model, or are damaged. Make them anew with python -m train tokenize"
            )
        if self.config.restart_positions:
            batch["positions"] = restarted_positions(batch["segment_ids"])
        return batch


_NOTHING_HELD_OUT = {
    "files": "data.eval_fraction = 0 holds no text out: give a share, or --eval.every 0",
    "tokens": "data.path: no document was held out when these tokens were made: make them with a "
    "larger --data.eval_fraction, or give --eval.every 0",
    "huggingface": "data.huggingface.eval_split = '': nothing to evaluate on: name a split, or "
    "give --eval.every 0",
}
