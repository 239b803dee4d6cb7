"""Which files are the corpus, in which order, and which of them are held out."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import blake2b
from os import walk
from pathlib import Path


@dataclass(frozen=True)
class Document:
    """One file."""

    path: Path
    """Where it was read."""
    text: bytes
    """All of it; not empty."""

    @property
    def hash(self) -> float:
        """Uniform in [0, 1), from the content alone: copies of a file share it."""
        return int.from_bytes(blake2b(self.text, digest_size=6).digest()) / 2**48


def standard_library() -> str:
    """Folder of this Python's standard library: a corpus every machine has."""
    return sysconfig.get_paths()["stdlib"]


def find_files(
    paths: tuple[str, ...], pattern: tuple[str, ...], skip: tuple[str, ...]
) -> list[Path]:
    """Files named in `paths`, and those under its folders whose name fits one of `pattern`.

    Sorted within each folder; hidden folders and those named in `skip` are not entered; a file
    reached twice counts once. Raises ValueError for a path that is not there, and for a folder
    without a fitting file.
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
    for folder, subfolders, names in walk(root):
        subfolders[:] = [s for s in subfolders if s not in skip and not s.startswith(".")]
        for name in names:
            if any(fnmatch(name, p) for p in pattern):
                yield Path(folder, name)


def read_documents(files: list[Path], max_bytes: int) -> list[Document]:
    """The files' contents, empty files left out.

    Raises ValueError for a file that cannot be read, for more than `max_bytes`, and for nothing
    at all.
    """
    documents = []
    total = 0
    for path in files:
        try:
            total += path.stat().st_size
            if total > max_bytes:
                raise ValueError(
                    f"data.max_bytes = {max_bytes}: the text has more, from {path} on. Name fewer "
                    "files in --data.path, or allow more (all is held in memory)"
                )
            text = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"data.path: {path} cannot be read ({error.strerror}). Leave it out, or make it "
                "readable"
            ) from error
        if text:
            documents.append(Document(path, text))
    if not documents:
        raise ValueError(
            f"data.path: {len(files)} file(s), all of them empty. Name files with text in them"
        )
    return documents


def split(documents: list[Document], eval_fraction: float) -> tuple[list[Document], list[Document]]:
    """(training, held out), together all documents, with no content in both.

    A file is held out if its hash is below `eval_fraction`, so a file stays on its side when
    others come or go. Where that leaves a side empty, it takes the file nearest to it; a lone
    file is cut, and its end held out.
    """
    if eval_fraction == 0:
        return documents, []
    contents = sorted({d.hash for d in documents})
    if len(contents) == 1:
        path, text = documents[0].path, documents[0].text
        cut = len(text) - max(1, min(round(len(text) * eval_fraction), len(text) - 1))
        return [Document(path, text[:cut])], [Document(path, text[cut:])]
    limit = min(max(eval_fraction, contents[1]), contents[-1])
    train = [d for d in documents if d.hash >= limit]
    return train, [d for d in documents if d.hash < limit]
