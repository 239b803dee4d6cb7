"""Documents and tokenizers for the tests of `train.data`."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from train.data.config import DataConfig
from train.data.documents import Document

WORDS = ("a", "b", "c", "one", "two", "three")


def documents(*texts: bytes | tuple[bytes, bytes]) -> list[Document]:
    """Of texts, and of (prompt, completion)s."""
    pairs = [(b"", text) if isinstance(text, bytes) else text for text in texts]
    return [Document(f"{i}.txt", text, prompt) for i, (prompt, text) in enumerate(pairs)]


def write_lines(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def word_tokenizer(path: Path) -> Path:
    """A tokenizer.json of a token a word: <bos> 0, <eos> 1, ? 2, then WORDS."""
    vocabulary = {word: i for i, word in enumerate(("<bos>", "<eos>", "?", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(path))
    return path


def config_of(path: Path, **fields) -> DataConfig:
    return DataConfig(path=(str(path),), **{"sequence_length": 16, "batch_size": 4, **fields})
