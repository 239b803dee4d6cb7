"""Tokens on disk: made by the command, mapped by training, the same batches as from the files."""

import io
import json
import signal
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
from rich.console import Console

from tests.train.data.helpers import config_of, documents, word_tokenizer, write_lines
from train.config import DataConfig
from train.data import TextData
from train.data.config import TokenizerConfig
from train.data.token_folder import open_tokens, write_tokens
from train.data.tokenize import tokenize
from train.data.tokenizer import ByteTokenizer, FileTokenizer


def made(corpus, out, **fields):
    console = Console(file=io.StringIO(), width=200)
    tokenize(config_of(corpus, **fields), out, console)
    return console.file.getvalue()


def test_the_same_sequences_as_from_the_files(corpus, tmp_path):
    made(corpus, tmp_path / "tokens", eval_fraction=0.2)
    from_files = TextData.load(config_of(corpus, eval_fraction=0.2), vocab_size=256)
    from_tokens = TextData.load(config_of(tmp_path / "tokens", source="tokens"), vocab_size=256)
    pairs = zip(
        [*islice(from_files.train_batches(), 20), *from_files.eval_set(9).batches],
        [*islice(from_tokens.train_batches(), 20), *from_tokens.eval_set(9).batches],
        strict=True,
    )
    for a, b in pairs:
        assert {k: v.tolist() for k, v in a.items()} == {k: v.tolist() for k, v in b.items()}
    assert from_tokens.train.order == from_files.train.order  # a run may go on with the other
    assert from_tokens.eval_set(1).bytes_per_token == from_files.eval_set(1).bytes_per_token


def test_it_says_what_is_in_it(corpus, tmp_path):
    text = made(corpus, tmp_path / "tokens", eval_fraction=0)
    meta = json.loads((tmp_path / "tokens/meta.json").read_text())
    assert meta["train"]["num_documents"] == 40 and meta["held_out"]["num_documents"] == 0
    size = (tmp_path / "tokens/train/tokens.bin").stat().st_size
    assert f"train: 40 documents, {size:,} tokens, {size - 40:,} bytes" in text
    assert "nothing held out: evaluation needs --eval.every 0" in text
    assert not list(tmp_path.glob("*.partial"))
    data = TextData.load(config_of(tmp_path / "tokens", source="tokens"), vocab_size=256)
    with pytest.raises(ValueError, match=r"no document was held out when these tokens were made"):
        data.eval_set(1)


def test_tokens_are_mapped_in_the_smallest_dtype(tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = 262_144
    write_tokens(tmp_path / "t", documents(b"ab", (b"q", b"r")), tokenizer, 0)
    row, held_out = open_tokens(tmp_path / "t", tokenizer)
    assert isinstance(row.tokens, np.memmap) and row.tokens.dtype == np.uint32
    assert (row.tokens.tolist(), held_out) == ([97, 98, 0, 113, 114, 0], None)
    assert (row.ends.tolist(), row.scored_from.tolist(), row.num_bytes) == ([3, 6], [0, 4], 3)


def test_a_killed_tokenising_leaves_no_folder_and_can_be_run_again(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from train.data.documents import Document\n"
        "from train.data.token_folder import write_tokens\n"
        "from train.data.tokenizer import ByteTokenizer\n"
        "def documents():\n"
        "    for i in range(1000):\n"
        "        yield Document('x', b'text')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_tokens(Path(sys.argv[1]), documents(), ByteTokenizer(), 0)\n"
    )
    out = tmp_path / "tokens"
    done = subprocess.run([sys.executable, "-c", code, str(out)])
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.partial"]
    with pytest.raises(ValueError, match=r"meta\.json cannot be read \(No such file"):
        open_tokens(out, ByteTokenizer())
    write_tokens(out, documents(b"again"), ByteTokenizer(), 0)
    assert open_tokens(out, ByteTokenizer())[0].num_tokens == 6


def test_refusals_of_making(corpus, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match=r"out = .*there.*: it is there already\. Give a new fold"):
        made(corpus, tmp_path / "there")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"out = .*: cannot be written \(Not a directory\)\. Give"):
        made(corpus, tmp_path / "file" / "tokens")
    with pytest.raises(ValueError, match=r"eval_fraction = 0\.9999 holds every document out"):
        made(corpus / "part0", tmp_path / "t", eval_fraction=0.9999)
    with pytest.raises(ValueError, match=r"data\.source = 'synthetic': no documents; give files"):
        tokenize(DataConfig(source="synthetic"), tmp_path / "t")


def test_refusals_of_training(corpus, tmp_path):
    folder = tmp_path / "tokens"
    config = config_of(folder, source="tokens")
    with pytest.raises(
        ValueError, match=r"meta\.json cannot be read \(No such file or directory\)"
    ):
        TextData.load(config, vocab_size=256)
    made(corpus, folder)
    other = FileTokenizer(TokenizerConfig(path=str(word_tokenizer(tmp_path / "t.json"))))
    with pytest.raises(ValueError, match=r"made by another tokenizer than data\.tokenizer names"):
        open_tokens(folder, other)
    tokens = folder / "train/tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=r"damaged \(.*tokens\.bin has \d+ bytes, and not \d+\)\. M"
    ):
        TextData.load(config, vocab_size=256)
    np.save(folder / "train/documents.npy", np.array([[1], [0]]))
    tokens.write_bytes(tokens.read_bytes() + b"\0")
    with pytest.raises(
        ValueError, match=r"damaged \(.*documents\.npy does not end where the token"
    ):
        TextData.load(config, vocab_size=256)
    (folder / "meta.json").write_text("{}")
    with pytest.raises(ValueError, match=r"damaged \('train'\)\. Make the folder anew with python"):
        TextData.load(config, vocab_size=256)


def test_the_command(corpus, tmp_path, capsys):
    from train.__main__ import main

    out = tmp_path / "tokens"
    main(["tokenize", "--out", str(out), "--data.path", str(corpus), "--data.eval_fraction", "0.3"])
    assert f"--data.source tokens --data.path {out}" in capsys.readouterr().out
    assert json.loads((out / "meta.json").read_text())["eval_fraction"] == 0.3
    with pytest.raises(SystemExit) as ended:
        main(["tokenize", "--out", str(out)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: out = ")


def test_a_large_jsonl_is_read_line_by_line(tmp_path, monkeypatch):
    """It may be larger than memory: its size is not asked, and it is not read whole."""
    lines = write_lines(tmp_path / "a.jsonl", *[{"text": f"{i}"} for i in range(1000)])
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: pytest.fail("read whole"))
    made(lines, tmp_path / "tokens", max_bytes=10, eval_fraction=0)
    assert json.loads((tmp_path / "tokens/meta.json").read_text())["train"]["num_documents"] == 1000
