"""A run from the command line: stopped, gone on with, finished, driven apart; in processes of their
own."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.train.test_loop import MICRO, REPOSITORY, rows_of

pytestmark = pytest.mark.slow


def start(folder, *options):
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    common = (
        "--name micro --steps 8 --data.path torch_gemma4 --eval.every 0 --sample.length 0 "
        "--log.no_tensorboard --log.every 1 --checkpoint.every_steps 5 "
        "--checkpoint.every_minutes 600"
    ).split()
    return subprocess.Popen(
        [sys.executable, "-m", "train", *MICRO, *common, "--log.dir", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=environment,
    )


def finish(process):
    out, err = process.communicate(timeout=500)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """(folder, ends): the same command thrice, the first one stopped by SIGTERM after a step."""
    folder = tmp_path_factory.mktemp("runs")
    first = start(folder)
    for line in first.stdout:
        if line.startswith("step 2/8"):
            first.send_signal(signal.SIGTERM)
            break
    ends = [finish(first)]
    ends.append((folder / "micro" / "metrics.jsonl").read_text())
    ends += [finish(start(folder)), finish(start(folder))]
    return folder / "micro", ends


def test_sigterm_ends_with_a_checkpoint_and_its_own_code(story):
    _, ((code, _, err), rows, *_) = story
    assert code == 75
    step = json.loads(rows.splitlines()[-1])["step"]
    assert 2 <= step <= 4
    last = f"preempted: step {step} is saved: the same command goes on from there"
    assert err.splitlines()[-1] == last


def test_the_same_command_goes_on(story):
    folder, (_, before, (code, out, err), _) = story
    assert code == 0, err
    step = json.loads(before.splitlines()[-1])["step"]
    assert f"going on from step {step}: {folder}/checkpoints/step-{step:08d} (" in out
    assert "with other settings" not in out
    rows = rows_of(folder)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert (folder / "metrics.jsonl").read_text().startswith(before)
    # As a run that was not stopped compiles, no more: what is loaded lies as a step leaves it.
    compilations = [row["compilations"] for row in rows]
    assert compilations[-1] == compilations[0]
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["skipped_updates"] == 0
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept[-2:] == ["step-00000005", "step-00000008"]


def test_a_finished_run_says_so(story):
    folder, (*_, (code, out, err)) = story
    assert (code, err) == (0, "")
    assert out.startswith(f"micro is finished: step 8 of 8 is in {folder}/checkpoints/step-0000000")


@pytest.mark.exhaustive
def test_a_training_driven_apart_ends_with_its_own_code(tmp_path):
    options = "--name apart --optim.learning_rate 1e30 --optim.abort_after 3".split()
    code, _, err = finish(start(tmp_path, *options))
    assert code == 80, err
    assert err.splitlines()[-1].startswith("diverged: the last 3 updates, up to step ")
    rows = rows_of(tmp_path / "apart")
    assert [row["skipped_in_a_row"] for row in rows[-4:]] == [0, 1, 2, 3]
    assert rows[-1]["loss"] is None
    assert len({row["compilations"] for row in rows}) == 1
