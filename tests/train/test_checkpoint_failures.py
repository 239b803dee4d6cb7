"""Storage that fails, and processes that are killed: nothing is lost."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.train.checkpoint_run import Run
from train.checkpoint import manifest, saver
from train.exit_codes import StorageFailure


class FullDisk(MemoryFileSystem):
    """Takes `room` bytes for shards."""

    protocol = "fulldisk"
    room = 10**9

    def _open(self, path, mode="rb", **options):
        stream = super()._open(path, mode, **options)
        if mode == "wb":
            write = stream.write

            def limited(data):
                if stream.tell() + len(data) > FullDisk.room:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return write(data)

            stream.write = limited
        return stream


def test_a_full_disk_is_told_at_the_next_step_and_the_last_good_one_stays(monkeypatch):
    fsspec.register_implementation("fulldisk", FullDisk, clobber=True)
    address = f"fulldisk://{uuid.uuid4()}"
    run = Run(address).save(3)
    monkeypatch.setattr(FullDisk, "room", 30_000)
    run.go_to(4).checkpointer.save(4)
    while not run.checkpointer.has_failed:  # what the loop asks at each step
        time.sleep(0.01)
    message = (
        rf"the checkpoint of step 4 could not be written to {address} \(No space left on device\); "
        rf"the last good one is {address}/step-00000003. Make room .* the same command again"
    )
    with pytest.raises(StorageFailure, match=message):
        run.checkpointer.wait()
    files, root = fsspec.core.url_to_fs(address)
    assert [os.path.basename(path) for path in files.ls(root, detail=False)] == ["step-00000003"]
    monkeypatch.undo()
    again = Run(address)
    assert again.restored() == 3
    again.save(4)
    assert Run(address).restored() == 4


def test_the_first_checkpoint_of_all_may_fail_too(tmp_path):
    (tmp_path / "file").write_text("where the folder should be")
    run = Run(tmp_path / "file" / "checkpoints").go_to(1)
    run.checkpointer.save(1)
    with pytest.raises(StorageFailure, match=r"\(Not a directory\); (none|and the place)"):
        run.checkpointer.wait()


def test_a_failure_is_raised_by_the_next_save_at_the_latest(tmp_path, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no such bucket\nand more")

    monkeypatch.setattr(saver, "write", fail)
    run = Run(tmp_path).go_to(1)
    run.checkpointer.save(1)
    with pytest.raises(StorageFailure, match=r"step 1 .*\(RuntimeError: no such bucket\); none is"):
        run.checkpointer.save(2)
    run.checkpointer.wait()  # told once


def test_an_old_checkpoint_that_cannot_be_removed_is_told(tmp_path, monkeypatch):
    run = Run(tmp_path, keep=1).save(1)

    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.rm", refuse)
    run.go_to(2).checkpointer.save(2)
    message = r"could not be removed from .* \(Permission denied\); that of step 2 is whole"
    with pytest.raises(StorageFailure, match=message):
        run.checkpointer.wait()
    monkeypatch.undo()
    assert Run(tmp_path).restored() == 2


# Killed


class Killed(BaseException):
    """What stands for kill -9: nothing runs after it."""


class Dying(MemoryFileSystem):
    """Does `left` changes, then none ever."""

    protocol = "dying"
    left = 10**9

    def _step(self):
        type(self).left -= 1
        if self.left < 0:
            raise Killed

    def _open(self, path, mode="rb", **options):
        if mode == "wb":
            self._step()
        stream = super()._open(path, mode, **options)
        if mode == "wb":
            write = stream.write

            def first_write(data):
                stream.write = write
                self._step()
                return write(data)

            stream.write = first_write
        return stream

    def rm_file(self, path):
        self._step()
        super().rm_file(path)

    def cp_file(self, *arguments, **options):
        self._step()
        super().cp_file(*arguments, **options)

    def makedirs(self, *arguments, **options):
        self._step()
        super().makedirs(*arguments, **options)


def test_killed_at_any_change_of_an_object_store_a_whole_checkpoint_is_left(monkeypatch):
    """Three saves that retire two of them, cut short after each number of changes."""
    fsspec.register_implementation("dying", Dying, clobber=True)
    monkeypatch.setattr(manifest, "installed_versions", dict)
    found = []
    while True:
        address = f"dying://{uuid.uuid4()}"
        Dying.left = len(found)
        run = Run(address, keep=1)
        try:
            run.save(1, 2, 3)
        except Killed:
            Dying.left = 10**9
            again = Run(address)
            step = again.restored()
            found.append(step)
            again.save(step + 1)
            assert Run(address).restored() == step + 1
            continue
        break
    assert len(found) >= 24
    assert found == sorted(found), "a later death loses no earlier checkpoint"
    assert set(found) == {0, 1, 2, 3}


def test_kill_9_at_random_moments_leaves_a_whole_checkpoint(tmp_path):
    """In a process of its own: it forks, which one with JAX's threads must not."""
    code = (
        "import pathlib, tests.train.test_checkpoint_failures as tests; "
        f"tests.kill_at_random_moments(pathlib.Path({str(tmp_path)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def kill_at_random_moments(tmp_path):
    """A child saves as fast as it can until it is killed; the next goes on from what it left."""
    draws = random.Random(0)
    begun = time.perf_counter()
    Run(tmp_path / "warm-up").save(1, 2)
    duration = (time.perf_counter() - begun) / 2
    last = 0
    for number in range(1, 13):
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(told)
            run = Run(tmp_path / "run", every_steps=10**6)
            step = run.restored()
            while True:
                step += 1
                run.save(step)
                os.write(tell, f"{step}\n".encode())
        os.close(tell)
        with open(told) as lines:
            done = [int(lines.readline())]
            time.sleep(draws.uniform(0, 3 * duration))
            os.kill(child, signal.SIGKILL)
            done += map(int, lines)
        os.waitpid(child, 0)
        assert done[0] == last + 1
        last = Run(tmp_path / "run").restored()
        assert last in (done[-1], done[-1] + 1)  # the one in progress may have been finished
        assert last >= number
        assert not [path for path in (tmp_path / "run").iterdir() if "writing" in path.name]
