"""From a config to samples to train on and sequences to evaluate on, a function a source."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from train.data.batches import SampleSource, ShuffledSource
from train.data.documents import check_size, find_files, read_documents, split
from train.data.packing import FitSequences, Sequence, Sequences, SplitSequences
from train.data.streaming import StreamSource, documents_of, open_rows
from train.data.synthetic import SyntheticSequences
from train.data.token_folder import open_tokens
from train.data.token_row import TokenRow, tokenise
from train.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from train.data.config import DataConfig

_SYNTHETIC = 1 << 20
"""Sequences of synthetic data before they repeat."""


@dataclass(frozen=True)
class HeldOut:
    """Sequences to evaluate on."""

    sequences: Sequences
    """At most as many as were asked for."""
    bytes_per_token: float
    """UTF-8 bytes for each token that carries loss; NaN where ids stand for no text."""


_Sides = tuple[SampleSource, Callable[[int], HeldOut] | None]
"""What to train on, and at most so many sequences to evaluate on, the same ones each time."""


def open_source(config: DataConfig, tokenizer: Tokenizer | None, vocab_size: int) -> _Sides:
    """The source of `config`; `tokenizer` is None for synthetic ids. Raises ValueError for what
    cannot be read, and for text shorter than one sequence."""
    if tokenizer is None:
        return _synthetic(config, vocab_size)
    make = {"files": _files, "tokens": _tokens, "huggingface": _stream}[config.source]
    return make(config, tokenizer)


def _synthetic(config: DataConfig, vocab_size: int) -> _Sides:
    def sequences(seed: int) -> SyntheticSequences:
        return SyntheticSequences(_SYNTHETIC, config.sequence_length, vocab_size, seed)

    # Another seed's sequences: the same rule, other draws.
    held_out = sequences(config.seed + 2**32)
    source = _shuffled(
        config, sequences(config.seed), {"source": "synthetic", "vocab_size": vocab_size}
    )
    return source, lambda number: HeldOut(_Chosen(held_out, range(number)), math.nan)


def _files(config: DataConfig, tokenizer: Tokenizer) -> _Sides:
    files = find_files(config.path, config.pattern, config.skip)
    check_size(files, config.max_bytes)
    train, held_out = split(list(read_documents(files, config)), config.eval_fraction)
    row = tokenise(held_out, tokenizer) if held_out else None
    return _packed(config, tokenizer, tokenise(train, tokenizer), row)


def _tokens(config: DataConfig, tokenizer: Tokenizer) -> _Sides:
    return _packed(config, tokenizer, *open_tokens(Path(config.path[0]), tokenizer))


def _packed(
    config: DataConfig, tokenizer: Tokenizer, train: TokenRow, held_out: TokenRow | None
) -> _Sides:
    length = config.sequence_length
    if train.num_tokens < length:
        raise ValueError(
            f"data.sequence_length = {length}: the training text has {train.num_tokens} "
            "tokens in all. Give shorter sequences, or more text in --data.path"
        )
    pack = FitSequences if config.packing == "fit" else SplitSequences
    order = {
        "packing": config.packing,
        "tokenizer": tokenizer.fingerprint,
        "num_tokens": train.num_tokens,
        "digest": train.digest,
    }
    source = _shuffled(config, pack(train, length), order)
    if held_out is None:
        return source, None
    packed = pack(held_out, length)
    shuffled = np.random.default_rng(config.seed).permutation(len(packed))
    return source, lambda number: HeldOut(
        _Chosen(packed, shuffled[:number]), held_out.bytes_per_token
    )


def _shuffled(config: DataConfig, sequences: Sequences, order: dict) -> ShuffledSource:
    order = {"sequence_length": config.sequence_length, "seed": config.seed} | order
    return ShuffledSource(sequences, seed=config.seed, prefetch=config.prefetch, order=order)


def _stream(config: DataConfig, tokenizer: Tokenizer) -> _Sides:
    source, split_name = StreamSource(config, tokenizer), config.huggingface.eval_split
    if not split_name:
        return source, None
    rows = open_rows(config, split_name)

    def first(number: int) -> HeldOut:
        documents = documents_of(rows, config, split_name)
        row = tokenise(documents, tokenizer, enough=number * config.sequence_length)
        packed = SplitSequences(row, config.sequence_length)
        chosen = range(min(number, len(packed)))
        return HeldOut(_Chosen(packed, chosen), row.bytes_per_token)

    return source, first


@dataclass(frozen=True)
class _Chosen:
    """Some of the sequences, in an order of their own."""

    sequences: Sequences
    order: SequenceType[int]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Sequence:
        return self.sequences[int(self.order[index])]
