"""Which files, which documents in them, and which of those are held out."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.data.helpers import config_of, documents, write_lines
from train.data.config import DataConfig
from train.data.documents import check_size, find_files, read_documents, split

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


def test_folder_that_cannot_be_read_is_named_and_not_left_out(tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    (tmp_path / "a.py").write_text("x")
    scan = os.scandir

    def refuse(path):  # permissions mean nothing to root, who runs these tests
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(
        ValueError, match=r"data\.path: folder .*locked cannot be read \(Permission"
    ):
        find_files((str(tmp_path),), ("*.py",), ())
    assert find_files((str(tmp_path),), ("*.py",), ("locked",))


# Documents


def read(*files, **fields):
    return list(read_documents(files, DataConfig(**fields)))


def test_a_text_file_is_a_document_and_a_jsonl_line_is_one(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n")
    (tmp_path / "empty.txt").touch()
    lines = write_lines(
        tmp_path / "b.jsonl",
        {"text": "first", "id": 3},
        {"text": ""},
        {"prompt": "2 + 2 = ", "completion": "4"},
        {"prompt": "", "completion": "\u00e9"},
    )
    with open(lines, "a") as file:
        file.write("\n")
    found = read(tmp_path / "a.txt", tmp_path / "empty.txt", lines)
    assert [(d.prompt, d.text) for d in found] == [
        (b"", b"one\ntwo\n"),
        (b"", b"first"),
        (b"2 + 2 = ", b"4"),
        (b"", "\u00e9".encode()),
    ]
    assert found[2].where == f"data.path: {lines}:3"


def test_fields_are_named_by_the_config(tmp_path):
    lines = write_lines(
        tmp_path / "a.jsonl", {"text": None, "q": "1", "a": "2"}, {"body": "3", "q": "4"}
    )
    found = read(lines, text_field="body", prompt_field="q", completion_field="a")
    assert [(d.prompt, d.text) for d in found] == [(b"1", b"2"), (b"", b"3")]


LINES = {
    "no JSON": (b'{"text": ', r"data\.path: .*a\.jsonl:2 is no JSON \(Expecting value"),
    "no UTF-8": (b'{"text": "\xff"}', r"a\.jsonl:2 is no JSON \('utf-8' codec can't decode"),
    "a list": (b"[1]", r"a\.jsonl:2 is list, and not an object with fields such as 'text'"),
    "no field": (
        b'{"body": "x"}',
        r"a\.jsonl:2: fields body, but not 'text', nor both 'prompt' an",
    ),
    "half a pair": (b'{"prompt": "x"}', r"fields prompt, but not 'text', nor both .* Name its own"),
    "a number": (b'{"text": 3}', r"a\.jsonl:2: field 'text' is int, not text\. Name another field"),
    "nothing to learn": (
        b'{"prompt": "x", "completion": ""}',
        r"a\.jsonl:2: 'completion' is empty, so there is nothing to learn",
    ),
    "a surrogate": (b'{"text": "\\ud800"}', r"a\.jsonl:2: half a surrogate pair is no text"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_bad_line_is_named(tmp_path, name):
    line, message = LINES[name]
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.jsonl")


def test_empty_files_are_no_text(tmp_path):
    (tmp_path / "a.py").touch()
    with pytest.raises(ValueError, match=r"1 file\(s\), all of them empty\. Name files with text"):
        read(tmp_path / "a.py")


@pytest.mark.parametrize("name", ["gone.py", "gone.jsonl"])
def test_unreadable_file_is_named(tmp_path, name):
    with pytest.raises(ValueError, match=rf"{name} cannot be read \(No such file"):
        read(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} cannot be read \(No such file"):
        check_size([tmp_path / name], 10)


def test_too_much_text_is_refused_before_it_is_read(tmp_path):
    (tmp_path / "a.py").write_text("x" * 11)
    with pytest.raises(
        ValueError, match=r"data\.max_bytes = 10: the text has more.*train tokenize"
    ):
        check_size([tmp_path / "a.py"], 10)
    check_size([tmp_path / "a.py"], 11)


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
        assert sorted(d.where for d in train + held_out) == sorted(d.where for d in docs)
        assert not {d.text for d in train} & {d.text for d in held_out}
    else:
        assert train[0].text + held_out[0].text == texts[0]


def test_split_is_stable_when_documents_come():
    texts = [b"document %d" % i for i in range(200)]
    _, before = split(documents(*texts[:100]), 0.1)
    _, after = split(documents(*texts), 0.1)
    assert {d.text for d in before} <= {d.text for d in after}
    assert 8 <= len(after) <= 35


def test_no_fraction_holds_nothing_out():
    docs = documents(b"a", b"b")
    assert split(docs, 0) == (docs, [])


def test_a_lone_prompt_cannot_be_cut():
    with pytest.raises(
        ValueError, match=r"eval_fraction = 0\.1: 0\.txt is the only one, and a pro"
    ):
        split(documents((b"q", b"a")), 0.1)


# Config

CONFIGS = {
    "tokens, no folder": (
        {"source": "tokens"},
        r"data\.path = \(\): name the one folder that pyth",
    ),
    "a stream, no name": (
        {"source": "huggingface"},
        r"data\.huggingface\.name = '': name the data",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_sources_want_a_place(name):
    fields, message = CONFIGS[name]
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields)
    assert config_of("x", source="tokens").path == ("x",)
