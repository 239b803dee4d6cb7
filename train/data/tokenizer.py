"""Text to token ids and back: bytes, a tokenizer.json, or a SentencePiece file."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from train.data.config import TokenizerConfig


class Tokenizer(Protocol):
    """What the rest of `train` asks of one."""

    vocab_size: int
    """Ids are below it."""
    begin: int | None
    """Id in front of every document, if any."""
    end: int
    """Id behind every document; a model that draws it has finished."""
    fingerprint: str
    """Equal for tokenizers that make the same ids."""

    def encode_all(self, texts: list[bytes]) -> list[np.ndarray]:
        """Unsigned ids [length] of each UTF-8 text, without begin and end. Raises ValueError for
        what is no text."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Text of int ids [length]."""
        ...


class ByteTokenizer:
    """Token ids are the 256 byte values of UTF-8 text, so one token is one byte.

    Byte 0 occurs in no text and ends every document.
    """

    vocab_size = 256
    begin = None
    end = 0
    fingerprint = "bytes"

    def encode_all(self, texts: list[bytes]) -> list[np.ndarray]:
        """uint8 ids. Bytes go through as they are. Raises ValueError where a text holds byte 0."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: bytes) -> np.ndarray:
        if self.end in text:
            raise ValueError(
                f"byte 0 at offset {text.index(self.end)}: this is not text. "
                "Leave the file out (--data.path, --data.pattern)"
            )
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: np.ndarray) -> str:
        """Bytes that are not UTF-8 become U+FFFD."""
        return np.asarray(ids, dtype=np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer.json of Hugging Face's tokenizers library, or a SentencePiece model.

    Ids of control tokens that occur in a text (such as "<eos>" written out) are the library's own
    choice: tokenizers takes them for the token.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        """Raises ValueError for a file that cannot be read or is of neither kind, for a token that
        it does not have, and where SentencePiece is not installed."""
        path = Path(config.path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"data.tokenizer.path = {config.path!r}: cannot be read ({error.strerror}). Name a "
                "local tokenizer.json or SentencePiece file"
            ) from error
        library = _SentencePiece if path.suffix == ".model" else _Tokenizers
        self._library = library(config.path, content)
        self.vocab_size = self._library.vocab_size
        self.begin = self._token("begin", config.begin) if config.begin else None
        self.end = self._token("end", config.end)
        self.fingerprint = f"{sha256(content).hexdigest()}:{self.begin}:{self.end}"

    def encode_all(self, texts: list[bytes]) -> list[np.ndarray]:
        """uint32 ids. Raises ValueError for text that is not UTF-8."""
        try:
            encoded = self._library.encode_all([text.decode() for text in texts])
            return [np.array(ids, dtype=np.uint32) for ids in encoded]
        except UnicodeDecodeError as error:
            raise ValueError(
                f"byte {error.object[error.start]:#04x} at offset {error.start} is not UTF-8: "
                "convert the file, or leave it out (--data.path, --data.pattern)"
            ) from error

    def decode(self, ids: np.ndarray) -> str:
        """Control tokens are left out."""
        return self._library.decode([int(i) for i in ids])

    def _token(self, field: str, token: str) -> int:
        found = self._library.token_id(token)
        if found is None:
            names = ", ".join(self._library.control_tokens()[:8]) or "none"
            raise ValueError(
                f"data.tokenizer.{field} = {token!r}: the file has no such token. Its control "
                f"tokens are {names}; give one of them"
            )
        return found


class _Tokenizers:
    def __init__(self, path: str, content: bytes) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises no class of its own
            raise ValueError(
                f"data.tokenizer.path = {path!r}: no tokenizer.json ({error}). Name one, or a "
                "SentencePiece file called *.model"
            ) from error
        # Its ids may have gaps: the largest one counts.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def control_tokens(self) -> list[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]


class _SentencePiece:
    def __init__(self, path: str, content: bytes) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ValueError(
                f"data.tokenizer.path = {path!r}: SentencePiece files need a package that is not "
                "installed: pip install -e '.[sentencepiece]'"
            ) from error
        try:
            self._processor = SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise ValueError(
                f"data.tokenizer.path = {path!r}: no SentencePiece file ({error}). Name one, or a "
                "tokenizer.json"
            ) from error
        self.vocab_size = self._processor.vocab_size()

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        return self._processor.encode(texts)

    def decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)

    def token_id(self, token: str) -> int | None:
        found = self._processor.piece_to_id(token)
        return found if self._processor.id_to_piece(found) == token else None

    def control_tokens(self) -> list[str]:
        ids = range(self.vocab_size)
        return [self._processor.id_to_piece(i) for i in ids if self._processor.is_control(i)]


def load_tokenizer(config: TokenizerConfig, vocab_size: int) -> Tokenizer:
    """The tokenizer of `config`. Raises ValueError if it has more ids than the model, besides
    what `FileTokenizer` raises."""
    tokenizer = FileTokenizer(config) if config.path else ByteTokenizer()
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"data.tokenizer.path = {config.path!r}: it has {tokenizer.vocab_size} ids, and "
            f"model.vocab_size = {vocab_size}: give the model at least as many"
        )
    return tokenizer


def add_ends(tokenizer: Tokenizer, prompt: np.ndarray, rest: np.ndarray) -> tuple[np.ndarray, int]:
    """([begin] + prompt + rest + [end], index of the first id of `rest` in it)."""
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    ids = np.concatenate([begin, prompt, rest, [tokenizer.end]]).astype(np.uint32)
    return ids, len(begin) + len(prompt)
