"""Text to batches: which files, held out how, packed how, in which order."""

import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from train.data.files import Document, find_files, read_documents, split

from train.config import DataConfig
from train.data import IGNORED, ByteTokenizer, PackedSequences, TextData

TOKENIZER = ByteTokenizer()


def documents(*texts: bytes) -> list[Document]:
    return [Document(Path(f"{i}.txt"), text) for i, text in enumerate(texts)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for i in range(40):
        folder = tmp_path / "src" / f"part{i % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.py").write_text(f"# file {i}\n" + f"x{i} = {i}\n" * (5 + i))
    return tmp_path / "src"


def config_of(path: Path, **fields) -> DataConfig:
    return DataConfig(path=(str(path),), **{"sequence_length": 16, "batch_size": 4, **fields})


# Tokenizer


@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_bytes_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert len(ids) == len(text.encode())


def test_decode_of_broken_utf8_is_marked():
    assert TOKENIZER.decode(np.array([97, 0xC3])) == "a\ufffd"


def test_separator_is_refused_in_text():
    with pytest.raises(ValueError, match=r"byte 0 at offset 2: this is not text\. Leave the file"):
        TOKENIZER.encode(b"ab\0c")


# Files


def test_find_files_sorts_filters_and_skips(tmp_path):
    for name in ("b.py", "a.txt", "c.bin", "sub/d.py", "tests/e.py", ".git/f.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_files((str(tmp_path),), ("*.py", "*.txt"), ("tests",))
    assert [f.relative_to(tmp_path.resolve()).as_posix() for f in found] == [
        "a.txt",
        "b.py",
        "sub/d.py",
    ]


def test_named_file_is_taken_whatever_its_name_and_once(tmp_path):
    file = tmp_path / "book.rst"
    file.write_text("text")
    assert find_files((str(file), str(file)), ("*.py",), ()) == [file.resolve()]


def test_missing_path_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data\.path = .*nothing.*: no such file or folder"):
        find_files((str(tmp_path / "nothing"),), ("*",), ())


def test_folder_without_a_fitting_file_is_named(tmp_path):
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(ValueError, match=r"no file in it is named like data\.pattern"):
        find_files((str(tmp_path),), ("*.py",), ())


def test_empty_files_are_no_text(tmp_path):
    (tmp_path / "a.py").touch()
    with pytest.raises(ValueError, match=r"1 file\(s\), all of them empty\. Name files with text"):
        read_documents([tmp_path / "a.py"], 10)


def test_unreadable_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.py cannot be read \(No such file"):
        read_documents([tmp_path / "gone.py"], 10)


def test_too_much_text_is_refused_before_it_is_read(tmp_path):
    (tmp_path / "a.py").write_text("x" * 11)
    with pytest.raises(ValueError, match=r"data\.max_bytes = 10: the text has more"):
        read_documents([tmp_path / "a.py"], 10)


# Held-out split


@given(
    st.lists(st.binary(min_size=2, max_size=4), min_size=1, max_size=30),
    st.floats(0.01, 0.99),
)
def test_split_keeps_everything_and_shares_nothing(texts, fraction):
    docs = documents(*texts)
    train, held_out = split(docs, fraction)
    assert train and held_out and all(d.text for d in train + held_out)
    if len(set(texts)) > 1:
        assert sorted(d.path for d in train + held_out) == sorted(d.path for d in docs)
        assert not {d.text for d in train} & {d.text for d in held_out}
    else:
        assert train[0].text + held_out[0].text == texts[0]


def test_split_is_stable_when_files_come():
    texts = [b"document %d" % i for i in range(200)]
    _, before = split(documents(*texts[:100]), 0.1)
    _, after = split(documents(*texts), 0.1)
    assert {d.text for d in before} <= {d.text for d in after}
    assert 8 <= len(after) <= 35


def test_no_fraction_holds_nothing_out():
    docs = documents(b"a", b"b")
    assert split(docs, 0) == (docs, [])


# Packing

texts = st.lists(
    st.binary(min_size=1, max_size=12).map(lambda b: b.replace(b"\0", b"x")), min_size=1, max_size=8
)


@given(texts, st.integers(2, 9))
def test_packing_against_its_definition(texts, length):
    packed = PackedSequences(documents(*texts), length, TOKENIZER)
    row = [(byte, d) for d, text in enumerate(texts) for byte in [*text, 0]]
    assert packed.num_tokens == len(row)
    assert len(packed) == -(-len(row) // length)
    for i in range(len(packed)):
        piece = row[i * length : (i + 1) * length]
        first_document = piece[0][1]
        padding = length - len(piece)
        ids = [byte for byte, _ in piece]
        segments = [d - first_document + 1 for _, d in piece]
        labels = [
            IGNORED if t == 0 or segments[t] != segments[t - 1] else ids[t] for t in range(len(ids))
        ]
        got = packed[i]
        assert got["input_ids"].tolist() == ids + [0] * padding
        assert got["segment_ids"].tolist() == segments + [0] * padding
        assert got["labels"].tolist() == labels + [IGNORED] * padding
        assert {a.dtype for a in got.values()} == {np.dtype(np.int32)}


def test_file_that_is_not_text_is_named():
    with pytest.raises(ValueError, match=r"data\.path: 0\.txt: byte 0 at offset 1"):
        PackedSequences(documents(b"a\0"), 4, TOKENIZER)


def test_no_documents():
    with pytest.raises(ValueError, match="no documents: there is no text"):
        PackedSequences([], 4, TOKENIZER)


# Batches


def test_batches_are_a_function_of_seed_and_number(corpus):
    data = TextData.load(config_of(corpus))
    whole = list(islice(data.train_batches(), 12))
    again = list(islice(TextData.load(config_of(corpus)).train_batches(), 12))
    resumed = list(islice(data.train_batches(start=7), 5))
    for a, b in zip(whole + whole[7:], again + resumed, strict=True):
        assert {k: v.tolist() for k, v in a.items()} == {k: v.tolist() for k, v in b.items()}
    assert all(v.shape == (4, 16) and v.dtype == np.int32 for b in whole for v in b.values())
    other = next(TextData.load(config_of(corpus, seed=1)).train_batches())
    assert other["input_ids"].tolist() != whole[0]["input_ids"].tolist()


def test_an_epoch_holds_every_sequence_once_and_epochs_differ(corpus):
    data = TextData.load(config_of(corpus, batch_size=1))
    n = len(data.train)
    rows = [tuple(b["input_ids"][0]) for b in islice(data.train_batches(), 2 * n)]
    everything = sorted(tuple(data.train[i]["input_ids"]) for i in range(n))
    assert sorted(rows[:n]) == sorted(rows[n:]) == everything
    assert rows[:n] != rows[n:]


def test_eval_batches_are_fixed_and_filled_up_with_rows_that_do_not_count(corpus):
    data = TextData.load(config_of(corpus))
    assert data.held_out is not None
    batches = data.eval_batches(10_000)
    rows = [row for b in batches for row in b["segment_ids"] if row.any()]
    assert len(rows) == len(data.held_out)
    assert all(v.shape == (4, 16) for b in batches for v in b.values())
    empty = batches[-1]["segment_ids"].max(axis=1) == 0
    assert (batches[-1]["labels"][empty] == IGNORED).all()
    again = data.eval_batches(1)
    assert len(again) == 1
    assert again[0]["input_ids"].tolist() == batches[0]["input_ids"].tolist()


def test_eval_without_held_out_text(corpus):
    data = TextData.load(config_of(corpus, eval_fraction=0))
    with pytest.raises(ValueError, match=r"data\.eval_fraction = 0 holds no text out"):
        data.eval_batches(1)


def test_text_shorter_than_a_sequence(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ValueError, match=r"data\.sequence_length = 16: the training text has 6 to"):
        TextData.load(config_of(tmp_path / "a.txt", eval_fraction=0))


def test_default_corpus_is_the_standard_library():
    data = TextData.load(DataConfig())
    assert data.train.num_tokens > 5_000_000
    assert data.held_out is not None and data.held_out.num_tokens > 50_000
    first = data.tokenizer.decode(data.train[0]["input_ids"])
    assert first.isprintable() or "\n" in first


def test_data_starts_no_device():
    code = (
        "import sys\n"
        "from train.config import DataConfig\n"
        "from train.data import TextData\n"
        "data = TextData.load(DataConfig())\n"
        "assert 'jax' not in sys.modules, 'jax before it is needed'\n"
        "next(data.train_batches())\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'a backend was started'\n"
        "assert 'torch_xla' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
