"""Saving beside the training, going on from the newest whole checkpoint, and every way it fails.

State here is of CPU tensors, whose value tells the step they belong to; test_checkpoint_mesh.py has
those of a mesh.
"""

import errno
import os
import random
import signal
import threading
import time
import uuid
from dataclasses import replace

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from train.checkpoint import Checkpointer, manifest, saver
from train.config import CheckpointConfig
from train.exit_codes import StorageFailure
from train.hosts import Hosts
from train.presets import cpu_tiny


class Data:
    """An iterator's position."""

    def __init__(self):
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Run:
    """A run whose whole state is known from its step."""

    def __init__(self, address, *, model=None, **changes):
        checkpoint = {"every_steps": 100, "every_minutes": 0} | changes
        resume = checkpoint.pop("resume", "auto")
        config = replace(cpu_tiny(), checkpoint=CheckpointConfig(**checkpoint), resume=resume)
        if model:
            config = replace(config, model=replace(config.model, **model))
        self.data, self.told = Data(), []
        self.tensors = {"w": torch.zeros(300, 50), "count": torch.zeros((), dtype=torch.int32)}
        self.checkpointer = Checkpointer(
            replace(config, steps=1000),
            str(address),
            Hosts(),
            self.tensors,
            self.data,
            lambda tensor: tensor,
            self.told.append,
        )

    def go_to(self, step):
        self.tensors["w"].copy_(torch.arange(15_000.0).view(300, 50) + step)
        self.tensors["count"].fill_(step)
        self.data.next = 16 * step
        return self

    def save(self, *steps):
        for step in steps:
            self.go_to(step).checkpointer.save(step)
        self.checkpointer.wait()
        return self

    def restored(self):
        """The step it goes on from, having checked that all of its state is that step's."""
        step = self.checkpointer.restore()
        expected = torch.arange(15_000.0).view(300, 50) + step if step else torch.zeros(300, 50)
        assert torch.equal(self.tensors["w"], expected)
        assert self.tensors["count"] == step and self.data.next == 16 * step
        return step


@pytest.fixture(params=["local", "memory"])
def address(request, tmp_path):
    return str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4()}"


def path_of(address, step, name):
    files, root = fsspec.core.url_to_fs(address)
    return files, f"{root}/step-{step:08d}/{name}"


def damage(address, step, name="__0_0.distcp"):
    files, path = path_of(address, step, name)
    content = bytearray(files.cat_file(path))
    content[len(content) // 2] ^= 4
    files.pipe_file(path, bytes(content))


# Going on


def test_a_run_without_checkpoints_begins(address):
    run = Run(address)
    assert run.restored() == 0 and run.told == []


def test_a_run_goes_on_from_its_newest_checkpoint_and_says_so(address):
    Run(address, keep=3).save(3, 20, 7)
    run = Run(address)
    assert run.restored() == 20
    assert len(run.told) == 1
    assert run.told[0].startswith(f"going on from step 20: {address}/step-00000020 (20")


def test_random_state_goes_on(address):
    torch.manual_seed(5)
    Run(address).save(1)
    expected = torch.rand(4)
    torch.manual_seed(6)
    assert Run(address).restored() == 1
    assert torch.equal(torch.rand(4), expected)


def test_a_checkpoint_is_what_was_there_when_it_was_asked_for(tmp_path, monkeypatch):
    """Training changes the tensors while the thread still writes."""
    may_write = threading.Event()
    write = saver.write
    monkeypatch.setattr(saver, "write", lambda *a: may_write.wait(20) and write(*a))
    run = Run(tmp_path).go_to(3)
    run.checkpointer.save(3)
    run.go_to(4)
    assert run.told == []
    may_write.set()
    run.checkpointer.wait()
    assert run.told == [f"checkpoint of step 3: {tmp_path}/step-00000003"]
    assert Run(tmp_path).restored() == 3


def test_other_settings_of_the_training_are_told(address):
    Run(address).save(1)
    run = Run(address, keep=7, model={"num_loss_tiles": 2})  # of which only the second matters
    assert run.restored() == 1
    assert run.told[1:] == [
        "with other settings than it was written with: model.num_loss_tiles 1 -> 2"
    ]


def test_required_refuses_to_begin(address):
    message = "resume = 'required': there is no finished checkpoint in .* --resume auto"
    with pytest.raises(ValueError, match=message):
        Run(address, resume="required").checkpointer.restore()
    Run(address).save(2)
    assert Run(address, resume="required").restored() == 2


def test_a_run_may_begin_with_anothers_checkpoint(tmp_path):
    Run(tmp_path / "a", keep=9).save(2, 4, 6)
    start = f"{tmp_path}/a/step-00000004"
    run = Run(tmp_path / "b", start_from=start)
    assert run.restored() == 4
    run.save(5)
    assert Run(tmp_path / "b", start_from=start).restored() == 5  # its own come first
    assert Run(tmp_path / "a").restored() == 6
    for missing in (f"{tmp_path}/a/step-00000005", f"{tmp_path}/a", "step-00000004"):
        with pytest.raises(ValueError, match=r"checkpoint\.start_from = .*no finished checkpoint"):
            Run(tmp_path / "c", start_from=missing).checkpointer.restore()
    damage(tmp_path / "a", 4)
    with pytest.raises(StorageFailure, match=r"step-00000004 is damaged: __0_0\.distcp does"):
        Run(tmp_path / "c", start_from=start).checkpointer.restore()
    assert Run(tmp_path / "a").restored() == 6


# Two clocks


def test_permanent_by_steps_temporary_by_minutes(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    run = Run(tmp_path, every_steps=100, every_minutes=10, keep=1)
    due = []
    for step in range(1, 401):
        clock[0] += 7  # seconds
        if run.checkpointer.is_due(step):
            due.append(step)
            run.save(step)
    # 600 s are 86 steps, counted from the last checkpoint of either kind.
    assert due == [86, 100, 186, 200, 286, 300, 386, 400]
    assert [step for step in due if run.checkpointer.is_permanent(step)] == [100, 200, 300, 400]
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [f"step-{step:08d}" for step in (100, 200, 300, 400)]


def test_the_last_step_is_permanent_and_a_clock_can_be_off(tmp_path):
    run = Run(tmp_path, every_steps=0, every_minutes=1e9)
    assert [step for step in range(1, 1001) if run.checkpointer.is_due(step)] == [1000]
    assert run.checkpointer.is_permanent(1000)


def test_a_temporary_checkpoint_waits_for_the_one_being_written(tmp_path, monkeypatch):
    may_write = threading.Event()
    write = saver.write
    monkeypatch.setattr(saver, "write", lambda *a: may_write.wait(20) and write(*a))
    run = Run(tmp_path, every_minutes=1e-9).go_to(1)
    assert run.checkpointer.is_due(1)
    run.checkpointer.save(1)
    assert not run.checkpointer.is_due(2) and run.checkpointer.is_due(100)
    may_write.set()
    run.checkpointer.wait()
    assert run.checkpointer.is_due(3)


# Another model, another layout


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"hidden_size": 256}, "holds another model: model.hidden_size 128 -> 256. Give"),
        ({"top_k_experts": 1}, "holds another model: model.top_k_experts 2 -> 1. Give"),
        (
            {"hidden_size": 256, "rms_norm_eps": 1e-5},
            "model.hidden_size 128 -> 256, model.rms_norm_eps 1e-06 -> 1e-05",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(address, model, message):
    Run(address).save(4)
    with pytest.raises(ValueError, match=message):
        Run(address, model=model).checkpointer.restore()
    assert Run(address).restored() == 4


def test_a_checkpoint_of_another_weight_layout_is_refused(address, monkeypatch):
    Run(address).save(4)
    monkeypatch.setattr("train.checkpoint.compatibility.LAYOUT", "stacked-2")
    message = (
        "step-00000004 has weight layout 'stacked-1', and this program reads 'stacked-2'. Go on "
        r"with the program that wrote it \(torch-gemma4 0.1.0\), or give another --name"
    )
    with pytest.raises(ValueError, match=message):
        Run(address).checkpointer.restore()
    monkeypatch.undo()
    assert Run(address).restored() == 4


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("w", (300, 51), r"first w: \(300, 50\) there, \(300, 51\) here"),
        ("v", (2,), r"first v: absent there, \(2,\) here"),
    ],
)
def test_other_tensors_are_refused(address, name, shape, message):
    Run(address).save(4)
    run = Run(address)
    run.tensors[name] = torch.zeros(shape)
    before = {name: tensor.clone() for name, tensor in run.tensors.items()}
    with pytest.raises(ValueError, match=f"holds other tensors than this run, {message}"):
        run.checkpointer.restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.tensors.items())
    assert run.data.next == 0


# Damage


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "checkpoint.json"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(address, name):
    Run(address).save(3, 4)
    damage(address, 4, name)
    run = Run(address)
    assert run.restored() == 3
    assert run.told[0].startswith(f"the checkpoint of step 4 is damaged ({name} ")
    assert run.told[0].endswith(f"set aside: {address}/damaged-step-00000004")
    run.save(4)
    assert Run(address).restored() == 4
    files, path = path_of(address, 4, name)
    assert files.exists(path.replace("step-", "damaged-step-"))


def test_when_all_are_damaged_nothing_begins_anew(address):
    Run(address).save(3, 4)
    for step in (3, 4):
        damage(address, step)
    for _ in range(2):  # by a restart either
        message = r"every checkpoint in .* is damaged \(damaged-step-00000003, damaged-step-000"
        with pytest.raises(StorageFailure, match=message):
            Run(address).checkpointer.restore()


# Failing storage


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
