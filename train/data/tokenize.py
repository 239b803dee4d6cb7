"""`python -m train tokenize`: documents of a source, written as tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from train.data.config import DataConfig
from train.data.documents import Document, find_files, read_documents
from train.data.streaming import documents_of, open_rows
from train.data.token_folder import write_tokens
from train.data.tokenizer import ByteTokenizer, FileTokenizer


def tokenize(config: DataConfig, out: Path, console: Console | None = None) -> None:
    """Makes the folder `out` and says what is in it. Raises ValueError for a source without
    documents, for what cannot be read, and for a folder that is there already."""
    console = console or Console()
    tokenizer = FileTokenizer(config.tokenizer) if config.tokenizer.path else ByteTokenizer()
    documents = _documents(config)
    with console.status("tokenising") as status:
        meta = write_tokens(
            out,
            _counted(documents, status.update),
            tokenizer,
            config.eval_fraction,
        )
    for side in ("train", "held_out"):
        counts = {
            name.removeprefix("num_"): f"{n:,}"
            for name, n in meta[side].items()
            if name != "digest"
        }
        console.print(f"{side}: {', '.join(f'{n} {name}' for name, n in counts.items())}")
    if not meta["held_out"]["num_documents"]:
        console.print("nothing held out: evaluation needs --eval.every 0")
    console.print(f"train on it: --data.source tokens --data.path {out}", soft_wrap=True)


def _documents(config: DataConfig) -> Iterator[Document]:
    if config.source == "files":
        return read_documents(find_files(config.path, config.pattern, config.skip), config)
    if config.source == "huggingface":
        split = config.huggingface.split
        return documents_of(open_rows(config, split), config, split)
    raise ValueError(f"data.source = {config.source!r}: no documents; give files or huggingface")


def _counted(documents: Iterator[Document], tell) -> Iterator[Document]:
    for number, document in enumerate(documents, start=1):
        yield document
        if number % 1000 == 0:
            tell(f"tokenising: {number:,} documents")
