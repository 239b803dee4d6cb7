"""Sequences out of nothing, over the whole vocabulary: for measuring, and with a known answer."""

import math

import numpy as np

from train.data.packing import IGNORED, Sequence

_NOISE = 0.1
_FACTOR = 5


class SyntheticSequences:
    """Sequence i is a function of i and the seed. The next token is 5 t + 1 modulo the vocabulary,
    but one in ten is drawn at random: a model can learn that, and no more (`least_loss`)."""

    def __init__(
        self, num_sequences: int, sequence_length: int, vocab_size: int, seed: int
    ) -> None:
        self._num_sequences, self._sequence_length = num_sequences, sequence_length
        self._vocab_size, self._seed = vocab_size, seed

    @property
    def least_loss(self) -> float:
        """Cross entropy of the best model, in nats a token."""
        right = 1 - _NOISE + _NOISE / self._vocab_size
        wrong = _NOISE / self._vocab_size
        return -right * math.log(right) - (self._vocab_size - 1) * wrong * math.log(wrong)

    def __len__(self) -> int:
        return self._num_sequences

    def __getitem__(self, index: int) -> Sequence:
        draws = np.random.default_rng((self._seed, index))
        length, vocab_size = self._sequence_length, self._vocab_size
        input_ids = draws.integers(vocab_size, size=length)
        for i in np.flatnonzero(draws.random(length - 1) >= _NOISE) + 1:
            input_ids[i] = (_FACTOR * input_ids[i - 1] + 1) % vocab_size
        input_ids = input_ids.astype(np.int32)
        labels = input_ids.copy()
        labels[0] = IGNORED
        return {
            "input_ids": input_ids,
            "labels": labels,
            "segment_ids": np.ones(length, dtype=np.int32),
        }
