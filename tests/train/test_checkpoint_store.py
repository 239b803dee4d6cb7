"""The folder of checkpoints: finish marks, what is kept, what counts as damage."""

import json
import os
import uuid
from dataclasses import replace

import fsspec
import pytest

from train.checkpoint.manifest import Damaged, FileRecord, Manifest, installed_versions
from train.checkpoint.store import MARK, CheckpointStore

CONTENT = bytes(range(256)) * 40


@pytest.fixture(params=["local", "memory"])
def address(request, tmp_path):
    if request.param == "local":
        return f"{tmp_path}/a run/checkpoints"
    return f"memory://{uuid.uuid4()}/checkpoints"


def manifest(step=1, permanent=False):
    from hashlib import blake2b

    record = FileRecord(len(CONTENT), blake2b(CONTENT, digest_size=16).hexdigest())
    return Manifest(
        step=step,
        permanent=permanent,
        written="2026-11-29T12:00:00+00:00",
        layout="stacked-1",
        config={"steps": 3},
        data={"next_sequence": 7},
        versions=installed_versions(),
        files={"__0_0.distcp": record},
    )


def write_files(store, step):
    """All but the mark."""
    folder = store.begin(step)
    files, path = fsspec.core.url_to_fs(folder)
    files.makedirs(path, exist_ok=True)
    files.pipe_file(f"{path}/__0_0.distcp", CONTENT)


def add(store, step, permanent=False):
    write_files(store, step)
    store.finish(step, manifest(step, permanent))


def test_what_is_finished_is_listed_in_order_and_read_back(address):
    store = CheckpointStore(address + "/")
    assert store.steps() == []
    for step in (300, 4, 100_000_000):
        add(store, step)
    assert store.steps() == [4, 300, 100_000_000]
    assert store.manifest(300) == manifest(300)
    store.verify(300, manifest().files)
    assert store.folder(300) == f"{address}/step-00000300"


def test_what_has_no_mark_is_not_there_and_is_cleared(address):
    store = CheckpointStore(address)
    add(store, 1)
    write_files(store, 2)
    assert store.steps() == [1]
    store.clear_unfinished()
    files, root = fsspec.core.url_to_fs(address)
    assert [os.path.basename(path) for path in files.ls(root, detail=False)] == ["step-00000001"]
    store.verify(1, manifest().files)


def test_a_finished_checkpoint_is_one_rename_away_until_then(tmp_path):
    """Locally, even with its mark, it has another name until it is whole."""
    store = CheckpointStore(str(tmp_path))
    write_files(store, 2)
    assert os.listdir(tmp_path) == ["writing-step-00000002"]
    (tmp_path / "writing-step-00000002" / MARK).write_text(manifest(2).to_json())
    assert store.steps() == []
    store.finish(2, manifest(2))
    assert os.listdir(tmp_path) == ["step-00000002"]


def test_abandoning_removes_what_was_being_written_alone(address):
    store = CheckpointStore(address)
    add(store, 1)
    write_files(store, 2)
    store.abandon(2)
    store.abandon(3)  # nothing was written yet
    write_files(store, 1)  # again: the finished one is not touched
    assert store.steps() == [1]


@pytest.mark.parametrize(
    ("keep", "left"),
    [(1, [2, 5, 8]), (2, [2, 5, 7, 8]), (3, [2, 5, 6, 7, 8]), (9, list(range(1, 9)))],
)
def test_temporary_ones_go_but_for_the_newest(address, keep, left):
    store = CheckpointStore(address)
    for step in range(1, 9):
        add(store, step, permanent=step in (2, 5))
    store.retire(keep)
    assert store.steps() == left
    for step in left:
        store.verify(step, manifest().files)


def test_half_a_removal_is_no_checkpoint(address, monkeypatch):
    store = CheckpointStore(address)
    for step in (1, 2):
        add(store, step)
    monkeypatch.setattr(store, "_remove", lambda name: None)  # killed here
    store.retire(keep=1)
    monkeypatch.undo()
    assert store.steps() == [2]
    store.clear_unfinished()
    store.verify(2, manifest().files)


def test_what_cannot_be_read_is_not_removed(address):
    store = CheckpointStore(address)
    for step in (1, 2):
        add(store, step)
    files, root = fsspec.core.url_to_fs(address)
    files.pipe_file(f"{root}/step-00000001/{MARK}", b"\xff")
    store.retire(keep=1)
    assert store.steps() == [1, 2]


FLIPPED = CONTENT[:5000] + bytes([CONTENT[5000] ^ 1]) + CONTENT[5001:]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "__0_0.distcp is missing"),
        (CONTENT[:-1], "__0_0.distcp has 10,239 bytes of 10,240"),
        (CONTENT + b"x", "__0_0.distcp has 10,241 bytes of 10,240"),
        (FLIPPED, "__0_0.distcp does not agree with its checksum"),
    ],
)
def test_damage_is_named(address, content, message):
    store = CheckpointStore(address)
    add(store, 1)
    files, root = fsspec.core.url_to_fs(address)
    path = f"{root}/step-00000001/__0_0.distcp"
    files.rm(path)
    if content is not None:
        files.pipe_file(path, content)
    with pytest.raises(Damaged, match=message):
        store.verify(1, store.manifest(1).files)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"\xff\xfe", "is not text"),
        (b"[1]", "cannot be read"),
        (manifest().to_json()[:-20].encode(), "cannot be read"),
        (manifest().to_json().replace('"step": 1', '"step": 2').encode(), "its own checksum"),
        (json.dumps({"step": 1}).encode(), "cannot be read"),
    ],
)
def test_a_damaged_mark_is_damage(address, content, message):
    store = CheckpointStore(address)
    add(store, 1)
    files, root = fsspec.core.url_to_fs(address)
    files.pipe_file(f"{root}/step-00000001/{MARK}", content)
    with pytest.raises(Damaged, match=f"checkpoint.json .*{message}"):
        store.manifest(1)


def test_what_is_set_aside_is_kept_and_not_counted(address):
    store = CheckpointStore(address)
    for _ in range(2):
        add(store, 1)
        aside = store.set_aside(1)
    assert store.steps() == []
    assert store.damaged() == ["damaged-step-00000001", "damaged-step-00000001-2"]
    assert aside == f"{address}/damaged-step-00000001-2"
    store.clear_unfinished()
    files, path = fsspec.core.url_to_fs(aside)
    assert files.cat_file(f"{path}/__0_0.distcp") == CONTENT


def test_a_manifest_says_what_it_was_given():
    written = manifest(7, permanent=True)
    assert Manifest.from_json(written.to_json()) == written
    assert replace(written, step=8) != written
    assert written.versions["torch"].startswith("2.")


def test_an_address_whose_library_is_missing(monkeypatch):
    def missing(address):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ValueError, match=r"'gs://b/runs': Please install gcsfs .*'\.\[gcs\]'\)"):
        CheckpointStore("gs://b/runs")


def test_an_address_that_nobody_knows():
    with pytest.raises(ValueError, match=r"checkpoint\.folder = 'nowhere://x': .*nowhere"):
        CheckpointStore("nowhere://x")
