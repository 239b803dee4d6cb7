"""Whose the folder of a run is, and what it says when there is nothing left to do."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from train.checkpoint.store import MARK
from train.config import CheckpointConfig, LogConfig
from train.hosts import Hosts
from train.presets import cpu_tiny
from train.run_folder import checkpoint_address, finished_line, run_folder


def config_in(folder, **changes):
    return replace(cpu_tiny(), log=LogConfig(dir=str(folder)), **changes)


def test_one_process_a_folder(tmp_path):
    config = config_in(tmp_path)
    with run_folder(config, Hosts()) as directory:
        assert directory == tmp_path / "cpu_tiny"
        with (
            pytest.raises(
                ValueError, match=r"cpu_tiny is in use by a running process \(pid \d+ on"
            ),
            run_folder(config, Hosts()),
        ):
            pass
        with run_folder(replace(config, resume="never"), Hosts()) as other:
            assert other == tmp_path / "cpu_tiny-2"
    with run_folder(config, Hosts()):
        pass


def test_only_who_holds_the_folder_writes_its_config(tmp_path):
    def steps():
        return json.loads((tmp_path / "cpu_tiny" / "config.json").read_text())["steps"]

    config = config_in(tmp_path)
    with run_folder(config, Hosts()):
        assert steps() == 100
        with (
            pytest.raises(ValueError, match="in use"),
            run_folder(replace(config, steps=7), Hosts()),
        ):
            pass
        assert steps() == 100
    with run_folder(replace(config, steps=7), Hosts()):
        assert steps() == 7


def test_the_folder_of_a_killed_process_is_free(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from dataclasses import replace\n"
        "from train.config import LogConfig\n"
        "from train.hosts import Hosts\n"
        "from train.presets import cpu_tiny\n"
        "from train.run_folder import run_folder\n"
        "config = replace(cpu_tiny(), log=LogConfig(dir=sys.argv[1]))\n"
        "with run_folder(config, Hosts()):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert done.returncode == -9
    with run_folder(config_in(tmp_path), Hosts()) as directory:
        assert directory == tmp_path / "cpu_tiny"


def test_checkpoints_are_in_the_runs_folder_or_where_they_are_wanted(tmp_path):
    assert checkpoint_address(cpu_tiny(), "cpu_tiny-2") == "runs/cpu_tiny-2/checkpoints"
    elsewhere = replace(cpu_tiny(), checkpoint=CheckpointConfig(folder="gs://bucket/runs/"))
    assert checkpoint_address(elsewhere, "a") == "gs://bucket/runs/a/checkpoints"


def test_a_run_with_no_step_left_says_so(tmp_path):
    config = config_in(tmp_path)
    assert finished_line(config) is None
    for step in (50, 100):
        folder = tmp_path / "cpu_tiny" / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        assert finished_line(config) is None  # step 50, then step 100 without its mark
        (folder / MARK).touch()
    assert finished_line(config) == (
        f"cpu_tiny is finished: step 100 of 100 is in {folder}. More --steps go on from there; "
        "another --name, or --resume never, begins anew"
    )
    assert finished_line(replace(config, steps=80)).startswith("cpu_tiny is finished: step 100 of")
    assert finished_line(replace(config, steps=101)) is None
    assert finished_line(replace(config, resume="never")) is None
    off = CheckpointConfig(every_minutes=0, every_steps=0)
    assert finished_line(replace(config, checkpoint=off)) is None
