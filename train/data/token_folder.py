"""Tokens on disk: made once (`python -m train tokenize`), mapped into memory by every run.

    FOLDER/meta.json               tokenizer, dtype, counts
    FOLDER/train/tokens.bin        ids of all documents, little endian, no header
    FOLDER/train/documents.npy     int64 [2, num_documents]: ends, scored_from (see TokenRow)
    FOLDER/held_out/...            the same, of the documents held out

The folder gets its name when it is whole: a tokenising that was killed leaves FOLDER.partial.
"""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from train.data.documents import Document
from train.data.token_row import TokenRow, encode_documents, id_dtype, new_digest
from train.data.tokenizer import Tokenizer

_VERSION = 1
_SIDES = ("train", "held_out")


class _Writer:
    """One side of the split, written as it comes."""

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        folder.mkdir()
        self._folder, self._dtype = folder, dtype
        self._file = open(folder / "tokens.bin", "wb")
        self._ends, self._scored_from = array("q"), array("q")
        self._digest = new_digest()
        self.num_tokens = self.num_bytes = 0

    def add(self, ids: np.ndarray, scored: int, num_bytes: int) -> None:
        self._file.write(ids.astype(self._dtype).tobytes())
        self._digest.update(ids)
        self._scored_from.append(self.num_tokens + scored)
        self.num_tokens += len(ids)
        self._ends.append(self.num_tokens)
        self.num_bytes += num_bytes

    def finish(self) -> dict[str, Any]:
        self._file.close()
        documents = np.array([self._ends, self._scored_from], dtype=np.int64)
        np.save(self._folder / "documents.npy", documents)
        return {
            "num_documents": len(self._ends),
            "num_tokens": self.num_tokens,
            "num_bytes": self.num_bytes,
            "digest": self._digest.hexdigest(),
        }


def write_tokens(
    folder: Path, documents: Iterable[Document], tokenizer: Tokenizer, eval_fraction: float
) -> dict[str, Any]:
    """Makes `folder` of `documents`, held out by hash; returns what meta.json says. Documents are
    written as they come; only two numbers of each are kept in memory.

    Raises ValueError if the folder is there already or cannot be written, and if no document is
    left to train on.
    """
    if folder.exists():
        raise ValueError(f"out = {str(folder)!r}: it is there already. Give a new folder")
    partial = folder.with_name(folder.name + ".partial")
    dtype = id_dtype(tokenizer.vocab_size).newbyteorder("<")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        sides = {side: _Writer(partial / side, dtype) for side in _SIDES}
        for document, ids, scored in encode_documents(documents, tokenizer):
            side = "held_out" if document.hash < eval_fraction else "train"
            sides[side].add(ids, scored, len(document.text))
        meta = {
            "version": _VERSION,
            "dtype": dtype.str,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": tokenizer.fingerprint,
            "eval_fraction": eval_fraction,
            **{side: writer.finish() for side, writer in sides.items()},
        }
        if not meta["train"]["num_documents"]:
            raise ValueError(
                f"data.eval_fraction = {eval_fraction} holds every document out: give a smaller "
                "share, or more documents"
            )
        (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        partial.rename(folder)
    except OSError as error:
        raise ValueError(
            f"out = {str(folder)!r}: cannot be written ({error.strerror}). Give a place with room"
        ) from error
    return meta


def open_tokens(folder: Path, tokenizer: Tokenizer) -> tuple[TokenRow, TokenRow | None]:
    """(training, held out) documents of `folder`, mapped, not read.

    Raises ValueError for a folder that `write_tokens` did not finish, that another tokenizer made,
    or whose files have changed.
    """
    where = f"data.path = {str(folder)!r}"
    try:
        meta = json.loads((folder / "meta.json").read_text())
        rows = [_open_side(folder / side, meta[side], meta["dtype"]) for side in _SIDES]
    except OSError as error:
        raise ValueError(
            f"{where}: {error.filename} cannot be read ({error.strerror}). Make the folder with "
            "python -m train tokenize"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: damaged ({error}). Make the folder anew with python -m train tokenize"
        ) from error
    if meta["tokenizer"] != tokenizer.fingerprint:
        raise ValueError(
            f"{where}: made by another tokenizer than data.tokenizer names. Give the file and the "
            "begin and end tokens it was made with (--data.tokenizer.path)"
        )
    train, held_out = rows
    assert train is not None, "write_tokens leaves no folder without training documents"
    return train, held_out


def _open_side(folder: Path, counts: dict[str, Any], dtype: str) -> TokenRow | None:
    if not counts["num_documents"]:
        return None
    ends, scored_from = np.load(folder / "documents.npy")
    size = (folder / "tokens.bin").stat().st_size
    expected = counts["num_tokens"] * np.dtype(dtype).itemsize
    if size != expected:
        raise ValueError(f"{folder / 'tokens.bin'} has {size} bytes, and not {expected}")
    if len(ends) != counts["num_documents"] or ends[-1] != counts["num_tokens"]:
        raise ValueError(f"{folder / 'documents.npy'} does not end where the tokens do")
    tokens = np.memmap(folder / "tokens.bin", dtype=dtype, mode="r")
    return TokenRow(tokens, ends, scored_from, counts["num_bytes"], counts["digest"])
