"""Tokenised documents one behind the other: what packing cuts sequences from."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import islice

import numpy as np

from train.data.documents import Document
from train.data.tokenizer import Tokenizer, add_ends


@dataclass(frozen=True)
class TokenRow:
    """Documents as one row of tokens, each with its begin and end tokens. Arrays may be mapped
    files."""

    tokens: np.ndarray
    """Unsigned ids [num_tokens]."""
    ends: np.ndarray
    """int64 [num_documents]: one past each document's last token; rising."""
    scored_from: np.ndarray
    """int64 [num_documents]: the document's first token that carries loss (its first of all never
    does, since nothing of its own comes before it)."""
    num_bytes: int
    """UTF-8 bytes of what carries loss."""
    digest: str
    """Of all tokens: what tells this row from another."""

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return len(self.tokens)

    @cached_property
    def num_scored(self) -> int:
        """Tokens that carry loss, as long as no cut comes before them."""
        starts = np.concatenate([[0], self.ends[:-1]])
        return int((self.ends - np.maximum(self.scored_from, starts + 1)).sum())

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes for each token that carries loss."""
        return self.num_bytes / max(self.num_scored, 1)


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned dtype that holds ids below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1)


def new_digest() -> blake2b:
    """To be updated with the uint32 ids of every document."""
    return blake2b(digest_size=8)


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, *, at_once: int = 256
) -> Iterator[tuple[Document, np.ndarray, int]]:
    """(document, ids with begin and end, index of the first id after the prompt) of each. Reads
    `at_once` documents together, which a tokenizer may spread over cores.

    Raises ValueError naming the document that is not text.
    """
    remaining = iter(documents)
    while chunk := list(islice(remaining, at_once)):
        parts = [part for document in chunk for part in (document.prompt, document.text)]
        try:
            encoded = tokenizer.encode_all(parts)
        except ValueError:
            encoded = [ids for document in chunk for ids in _encode_named(document, tokenizer)]
        for document, prompt, text in zip(chunk, encoded[::2], encoded[1::2], strict=True):
            yield document, *add_ends(tokenizer, prompt, text)


def _encode_named(document: Document, tokenizer: Tokenizer) -> list[np.ndarray]:
    try:
        return tokenizer.encode_all([document.prompt, document.text])
    except ValueError as error:
        raise ValueError(f"{document.where}: {error}") from error


def tokenise(
    documents: Iterable[Document], tokenizer: Tokenizer, enough: float = math.inf
) -> TokenRow:
    """`documents` in memory, no more of them than make `enough` tokens. Raises ValueError if there
    are none, besides `encode_documents`."""
    dtype, digest = id_dtype(tokenizer.vocab_size), new_digest()
    pieces, ends, scored_from = [], array("q"), array("q")
    length = num_bytes = 0
    for document, ids, scored in encode_documents(documents, tokenizer):
        pieces.append(ids.astype(dtype))
        digest.update(ids)
        scored_from.append(length + scored)
        length += len(ids)
        ends.append(length)
        num_bytes += len(document.text)
        if length >= enough:
            break
    if not pieces:
        raise ValueError("no documents: there is no text to make sequences from")
    arrays = (np.concatenate(pieces), np.array(ends), np.array(scored_from))
    return TokenRow(*arrays, num_bytes, digest.hexdigest())
