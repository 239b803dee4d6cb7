"""Bytes, tokenizer.json and SentencePiece."""

import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.data.helpers import word_tokenizer
from train.data.config import TokenizerConfig
from train.data.tokenizer import ByteTokenizer, FileTokenizer, add_ends, load_tokenizer

TOKENIZER = ByteTokenizer()


@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_bytes_round_trip(text):
    (ids,) = TOKENIZER.encode_all([text.encode()])
    assert TOKENIZER.decode(ids) == text
    assert len(ids) == len(text.encode())


def test_decode_of_broken_utf8_is_marked():
    assert TOKENIZER.decode(np.array([97, 0xC3])) == "a\ufffd"


def test_byte_0_is_refused_in_text():
    with pytest.raises(ValueError, match=r"byte 0 at offset 2: this is not text\. Leave the file"):
        TOKENIZER.encode_all([b"ab\0c"])


def test_a_tokenizer_json(tmp_path):
    path = word_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(TokenizerConfig(path=str(path)), vocab_size=9)
    assert (tokenizer.vocab_size, tokenizer.begin, tokenizer.end) == (9, 0, 1)
    ids = tokenizer.encode_all([b"a one unknown", b""])
    assert [i.tolist() for i in ids] == [[3, 6, 2], []]
    assert tokenizer.decode(np.array([0, 3, 6, 1])) == "a one"
    without = FileTokenizer(TokenizerConfig(path=str(path), begin=""))
    assert without.begin is None
    assert without.fingerprint != tokenizer.fingerprint


def test_begin_and_end_go_around_prompt_and_text(tmp_path):
    tokenizer = FileTokenizer(TokenizerConfig(path=str(word_tokenizer(tmp_path / "t.json"))))
    ids, scored = add_ends(tokenizer, *tokenizer.encode_all([b"a b", b"c"]))
    assert (ids.tolist(), scored) == ([0, 3, 4, 5, 1], 3)
    ids, scored = add_ends(TOKENIZER, *TOKENIZER.encode_all([b"", b"xy"]))
    assert (ids.tolist(), scored) == ([120, 121, 0], 0)


def test_refusals_of_a_file(tmp_path):
    path = str(word_tokenizer(tmp_path / "tokenizer.json"))
    with pytest.raises(
        ValueError, match=r"data\.tokenizer\.path = .*none.*: cannot be read \(No su"
    ):
        FileTokenizer(TokenizerConfig(path=str(tmp_path / "none.json")))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"data\.tokenizer\.path = .*bad.*: no tokenizer\.json \("):
        FileTokenizer(TokenizerConfig(path=str(tmp_path / "bad.json")))
    message = (
        r"data\.tokenizer\.end = '</s>': the file has no such token\. .* are <bos>, <eos>; give"
    )
    with pytest.raises(ValueError, match=message):
        FileTokenizer(TokenizerConfig(path=path, end="</s>"))
    with pytest.raises(ValueError, match=r"data\.tokenizer\.end = '': documents are told apart by"):
        TokenizerConfig(end="")
    with pytest.raises(ValueError, match=r"it has 9 ids, and model\.vocab_size = 8: give the mod"):
        load_tokenizer(TokenizerConfig(path=path), vocab_size=8)
    with pytest.raises(ValueError, match=r"byte 0xff at offset 1 is not UTF-8: convert the file"):
        FileTokenizer(TokenizerConfig(path=path)).encode_all([b"a", b"b\xff"])


class FakeProcessor:
    """SentencePieceProcessor as far as it is used; <s>, </s>, then a piece a letter."""

    pieces = ("<unk>", "<s>", "</s>", *"abc")

    def __init__(self, model_proto):
        if model_proto != b"a model":
            raise RuntimeError("could not parse ModelProto")

    def vocab_size(self):
        return len(self.pieces)

    def encode(self, texts):
        return [[self.piece_to_id(letter) for letter in text] for text in texts]

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids if not self.is_control(i))

    def piece_to_id(self, piece):
        return self.pieces.index(piece) if piece in self.pieces else 0

    def id_to_piece(self, i):
        return self.pieces[i]

    def is_control(self, i):
        return i in (1, 2)


def test_a_sentencepiece_file(tmp_path, monkeypatch):
    (tmp_path / "t.model").write_bytes(b"a model")
    config = TokenizerConfig(path=str(tmp_path / "t.model"), begin="<s>", end="</s>")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ValueError, match=r"not installed: pip install -e '\.\[sentencepiece\]'"):
        FileTokenizer(config)
    module = ModuleType("sentencepiece")
    module.SentencePieceProcessor = FakeProcessor
    monkeypatch.setitem(sys.modules, "sentencepiece", module)
    tokenizer = FileTokenizer(config)
    assert (tokenizer.vocab_size, tokenizer.begin, tokenizer.end) == (6, 1, 2)
    assert tokenizer.encode_all([b"abz"])[0].tolist() == [3, 4, 0]
    assert tokenizer.decode(np.array([1, 3, 5, 2])) == "ac"
    with pytest.raises(ValueError, match=r"end = '<eos>': .* control tokens are <s>, </s>; give"):
        FileTokenizer(TokenizerConfig(path=config.path, begin="<s>"))
    (tmp_path / "t.model").write_bytes(b"else")
    with pytest.raises(ValueError, match=r"t\.model.*: no SentencePiece file \(could not parse"):
        FileTokenizer(config)
