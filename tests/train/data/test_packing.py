"""Sequences against their definition, written out token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.data.helpers import documents
from train.data.packing import IGNORED, FitSequences, SplitSequences
from train.data.token_row import tokenise
from train.data.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
text = st.binary(min_size=1, max_size=12).map(lambda b: b.replace(b"\0", b"x"))
prompted = st.tuples(text, text)
texts = st.lists(st.one_of(text, prompted), min_size=1, max_size=8)


def labelled_row(texts):
    """(id, document, whether it is of the prompt) of every token, in a row."""
    row = []
    for number, document in enumerate(documents(*texts)):
        row += [(byte, number, True) for byte in document.prompt]
        row += [(byte, number, False) for byte in [*document.text, 0]]
    return row


def expected(piece, length):
    """The sequence of `piece`, tokens of a labelled row."""
    ids = [i for i, _, _ in piece]
    numbers = [d for _, d, _ in piece]
    changes = [t == 0 or numbers[t] != numbers[t - 1] for t in range(len(piece))]
    segments = np.cumsum(changes).tolist()
    labels = [
        IGNORED if changes[t] or of_prompt else i for t, (i, _, of_prompt) in enumerate(piece)
    ]
    padding = [0] * (length - len(piece))
    return ids + padding, segments + padding, labels + [IGNORED] * len(padding)


def as_lists(sequence):
    assert {a.dtype for a in sequence.values()} == {np.dtype(np.int32)}
    return tuple(sequence[name].tolist() for name in ("input_ids", "segment_ids", "labels"))


@given(texts, st.integers(2, 9))
def test_split_against_its_definition(texts, length):
    row = labelled_row(texts)
    tokens = tokenise(documents(*texts), TOKENIZER)
    packed = SplitSequences(tokens, length)
    assert tokens.num_tokens == len(row)
    assert len(packed) == -(-len(row) // length)
    for i in range(len(packed)):
        assert as_lists(packed[i]) == expected(row[i * length : (i + 1) * length], length)


@given(texts, st.integers(2, 30))
def test_fit_keeps_documents_whole_and_loses_nothing(texts, length):
    row = labelled_row(texts)
    packed = FitSequences(tokenise(documents(*texts), TOKENIZER), length)
    pieces = [
        tuple(t[:3] for t in document[start : start + length])
        for number in range(len(texts))
        for document in [[t for t in row if t[1] == number]]
        for start in range(0, len(document), length)
    ]
    found = []
    for i in range(len(packed)):
        sequence = packed[i]
        for segment in range(1, sequence["segment_ids"].max() + 1):
            at = sequence["segment_ids"] == segment
            found.append((sequence["input_ids"][at].tolist(), sequence["labels"][at].tolist()))
        padding = sequence["segment_ids"] == 0
        assert (sequence["labels"][padding] == IGNORED).all()
        assert not sequence["input_ids"][padding].any()
        assert np.all(np.diff(padding.astype(int)) >= 0)  # at the end alone
    want = [(ids, labels) for ids, _, labels in (expected(p, len(p)) for p in pieces)]
    assert sorted(found) == sorted(want)


def test_fit_takes_the_tightest_place():
    # Sizes with the end token: 5, 7, 3, 5 into sequences of 10: 7 + 3, not 5 + 3.
    packed = FitSequences(tokenise(documents(b"aaaa", b"bbbbbb", b"cc", b"dddd"), TOKENIZER), 10)
    assert [bytes(packed[i]["input_ids"].tolist()) for i in range(len(packed))] == [
        b"aaaa\0dddd\0",
        b"bbbbbb\0cc\0",
    ]


def test_bytes_for_each_token_that_carries_loss():
    row = tokenise(documents(b"abc", (b"prompt", b"de")), TOKENIZER)
    # b, c, end; d, e, end: a document's first token has nothing before it.
    assert (row.num_scored, row.num_bytes) == (6, 5)
    assert row.bytes_per_token == pytest.approx(5 / 6)


def test_a_document_that_is_not_text_is_named():
    with pytest.raises(ValueError, match=r"1\.txt: byte 0 at offset 1"):
        tokenise(documents(b"fine", b"a\0"), TOKENIZER)


def test_no_documents():
    with pytest.raises(ValueError, match="no documents: there is no text"):
        tokenise([], TOKENIZER)
