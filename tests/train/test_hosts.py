"""Two hosts, each a process, agree on what one alone cannot know."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train import hosts_worker
from train.hosts import Hosts
from train.launch import rendezvous


def test_one_host_agrees_with_itself():
    hosts = Hosts()
    assert hosts.is_first and hosts.any(True, False) == (True, False)
    assert hosts.gather("x") == ["x"]


def test_hosts_meet_at_the_launchers_address_or_the_slices():
    assert rendezvous({"MASTER_ADDR": "10.0.0.1"}) == "env://"
    assert rendezvous({}) == "xla://"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        environment = os.environ | {"MASTER_PORT": str(free.getsockname()[1])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", hosts_worker.__name__, str(rank), str(folder / "run")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=500) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]  # after gloo's lines


slow = pytest.mark.slow


@slow
def test_what_one_host_knows_all_do(results):
    assert [host["any"] for host in results] == [[True, True, False]] * 2


@slow
def test_each_host_writes_its_part_of_one_checkpoint(results):
    for host in results:
        assert host["before"] == 0
        assert host["files"] == [".metadata", "__0_0.distcp", "__1_0.distcp", "checkpoint.json"]
        assert host["restored"] == [2, True] and host["data"] == {"next": 3}


@slow
def test_damage_that_one_host_sees_sends_all_back(results):
    for host in results:
        step, is_equal, told = host["after damage"]
        assert step == 1 and is_equal
        assert told[0].startswith("the checkpoint of step 2 is damaged (__1_0.distcp has ")


@slow
def test_a_folder_that_hosts_do_not_share_is_refused(results):
    for host in results:
        assert "is not the same folder on all 2 hosts" in host["private"]


@slow
def test_a_full_disk_of_one_host_is_told_by_all(results):
    for host in results:
        assert "step 5 could not be written" in host["full"]
        assert "(No space left on device)" in host["full"]
