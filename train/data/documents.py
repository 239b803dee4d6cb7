"""Which files are the corpus, in which order, what documents they hold, and which of those are held
out."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import blake2b
from os import walk
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.data.config import DataConfig


@dataclass(frozen=True)
class Document:
    """A file, a line of a .jsonl file, or a row of a data set."""

    where: str
    """Where it was read, for messages."""
    text: bytes
    """UTF-8; not empty. After a prompt, what completes it."""
    prompt: bytes = b""
    """What comes before and carries no loss."""

    @property
    def hash(self) -> float:
        """Uniform in [0, 1), from the content alone: copies of a document share it."""
        digest = blake2b(self.prompt + self.text, digest_size=6).digest()
        return int.from_bytes(digest) / 2**48


def standard_library() -> str:
    """Folder of this Python's standard library: a corpus every machine has."""
    return sysconfig.get_paths()["stdlib"]


def find_files(
    paths: tuple[str, ...], pattern: tuple[str, ...], skip: tuple[str, ...]
) -> list[Path]:
    """Files named in `paths`, and those under its folders whose name fits one of `pattern`.

    Sorted within each folder; hidden folders, those named in `skip` and links to folders are not
    entered; a file reached twice counts once. Raises ValueError for a path that is not there, for a
    folder that cannot be read, and for one without a fitting file.
    """
    files: dict[Path, None] = {}
    for path in map(Path, paths or (standard_library(),)):
        if path.is_file():
            found = [path]
        elif path.is_dir():
            found = sorted(_walk(path, pattern, skip))
        else:
            raise ValueError(f"data.path = {str(path)!r}: no such file or folder")
        if not found:
            raise ValueError(
                f"data.path = {str(path)!r}: no file in it is named like data.pattern = {pattern}: "
                "give other patterns, such as --data.pattern '*.rst'"
            )
        files.update((file.resolve(), None) for file in found)
    return list(files)


def _walk(root: Path, pattern: tuple[str, ...], skip: tuple[str, ...]) -> Iterator[Path]:
    for folder, subfolders, names in walk(root, onerror=_refuse_folder):
        subfolders[:] = [s for s in subfolders if s not in skip and not s.startswith(".")]
        for name in names:
            if any(fnmatch(name, p) for p in pattern):
                yield Path(folder, name)


def _refuse_folder(error: OSError) -> None:
    raise ValueError(
        f"data.path: folder {error.filename} cannot be read ({error.strerror}). Make it readable, "
        "or leave it out by name (--data.skip)"
    ) from error


def read_documents(files: Iterable[Path], config: DataConfig) -> Iterator[Document]:
    """The documents of `files`, in order, empty ones left out; a file is read when it is reached.

    Raises ValueError for a file that cannot be read, for a .jsonl line that is none or lacks the
    fields, and for nothing at all.
    """
    num_files = num_documents = 0
    for path in files:
        num_files += 1
        try:
            for document in _documents_of(path, config):
                if document.text:
                    num_documents += 1
                    yield document
        except OSError as error:
            raise _unreadable(path, error) from error
    if not num_documents:
        raise ValueError(
            f"data.path: {num_files} file(s), all of them empty. Name files with text in them"
        )


def check_size(files: Iterable[Path], max_bytes: int) -> None:
    """Raises ValueError if the files have more than `max_bytes` together."""
    total = 0
    for path in files:
        try:
            total += path.stat().st_size
        except OSError as error:
            raise _unreadable(path, error) from error
        if total > max_bytes:
            raise ValueError(
                f"data.max_bytes = {max_bytes}: the text has more, from {path} on. Name fewer "
                "files in --data.path, allow more (all is held in memory), or make tokens that are "
                "not: python -m train tokenize"
            )


def row_document(where: str, row: Mapping[str, Any], config: DataConfig) -> Document:
    """The document of a row: its text, or prompt and completion. Raises ValueError if it has
    neither, or a field that is no text."""
    text, prompt, completion = config.text_field, config.prompt_field, config.completion_field
    if row.get(text) is not None:
        fields = ("", text)
    elif row.get(prompt) is not None and row.get(completion) is not None:
        fields = (prompt, completion)
    else:
        raise ValueError(
            f"{where}: fields {', '.join(row) or 'none'}, but not {text!r}, nor both {prompt!r} "
            f"and {completion!r}. Name its own (--data.text_field, --data.prompt_field, "
            "--data.completion_field)"
        )
    values = {name: row[name] for name in fields if name}
    for name, value in values.items():
        if not isinstance(value, str):
            raise ValueError(
                f"{where}: field {name!r} is {type(value).__name__}, not text. Name another field, "
                "or correct the row"
            )
    try:
        encoded = [values.get(name, "").encode() for name in fields]
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: half a surrogate pair is no text. Correct the row") from error
    if fields[0] and not encoded[1]:
        raise ValueError(
            f"{where}: {completion!r} is empty, so there is nothing to learn. Leave the row out"
        )
    return Document(where, encoded[1], encoded[0])


def _documents_of(path: Path, config: DataConfig) -> Iterator[Document]:
    if path.suffix != ".jsonl":
        yield Document(f"data.path: {path}", path.read_bytes())
        return
    with open(path, "rb") as lines:  # one at a time: such files may be larger than memory
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _line_document(f"data.path: {path}:{number}", line, config)


def _line_document(where: str, line: bytes, config: DataConfig) -> Document:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{where} is no JSON ({error}). A .jsonl file has an object a line"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(
            f"{where} is {type(row).__name__}, and not an object with fields such as "
            f"{config.text_field!r}"
        )
    return row_document(where, row, config)


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(
        f"data.path: {path} cannot be read ({error.strerror}). Leave it out, or make it readable"
    )


def split(documents: list[Document], eval_fraction: float) -> tuple[list[Document], list[Document]]:
    """(training, held out), together all documents, with no content in both.

    A document is held out if its hash is below `eval_fraction`, so it stays on its side when others
    come or go. Where that leaves a side empty, it takes the document nearest to it; a lone text is
    cut, and its end held out. Raises ValueError for a lone prompt, which cannot be cut.
    """
    if eval_fraction == 0:
        return documents, []
    contents = sorted({d.hash for d in documents})
    if len(contents) == 1:
        return _cut(documents[0], eval_fraction)
    limit = min(max(eval_fraction, contents[1]), contents[-1])
    train = [d for d in documents if d.hash >= limit]
    return train, [d for d in documents if d.hash < limit]


def _cut(document: Document, eval_fraction: float) -> tuple[list[Document], list[Document]]:
    where, text = document.where, document.text
    if document.prompt:
        raise ValueError(
            f"data.eval_fraction = {eval_fraction}: {where} is the only one, and a prompt cannot "
            "be cut to hold some out. Give more, or 0 and --eval.every 0"
        )
    cut = len(text) - max(1, min(round(len(text) * eval_fraction), len(text) - 1))
    return [Document(where, text[:cut])], [Document(where, text[cut:])]
