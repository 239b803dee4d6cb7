"""Rows in a file, scalars in TensorBoard, lines for a person; nothing overwritten."""

import io
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train.config import CheckpointConfig, LogConfig, RunConfig
from train.metrics import MetricsWriter, create_run_directory, expert_load_metrics
from train.presets import cpu_tiny


def config_in(folder: Path) -> RunConfig:
    return replace(cpu_tiny(), log=LogConfig(dir=str(folder / "runs")))


@pytest.mark.parametrize(
    "changes",
    [{"resume": "never"}, {"checkpoint": CheckpointConfig(every_minutes=0, every_steps=0)}],
)
def test_the_folder_of_a_run_that_cannot_go_on_is_never_reused(tmp_path, changes):
    config = replace(config_in(tmp_path), **changes)
    made = [create_run_directory(config) for _ in range(3)]
    assert [d.name for d in made] == ["cpu_tiny", "cpu_tiny-2", "cpu_tiny-3"]
    assert json.loads((made[1] / "config.json").read_text()) == json.loads(config.to_json())


def test_a_run_that_may_go_on_has_one_folder(tmp_path):
    config = config_in(tmp_path)
    made = [create_run_directory(config) for _ in range(2)]
    assert made == [tmp_path / "runs" / "cpu_tiny"] * 2
    create_run_directory(replace(config, steps=7))
    assert json.loads((made[0] / "config.json").read_text())["steps"] == 7


def test_run_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ValueError, match=r"log\.dir = .*no folder can be made there \(File exists"):
        create_run_directory(config_in(tmp_path))


def test_rows_and_scalars(tmp_path):
    with MetricsWriter(tmp_path, LogConfig(), num_steps=2, console=_plain()) as metrics:
        metrics.log(1, loss=5.5, grad_norm=float("nan"))
        metrics.log(2, loss=5.0, grad_norm=1.0, eval_loss=5.25, dead_experts=3)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": 1, "loss": 5.5, "grad_norm": None},
        {"step": 2, "loss": 5.0, "grad_norm": 1.0, "eval_loss": 5.25, "dead_experts": 3},
    ]
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 5.5), (2, 5.0)]
    assert [(e.step, e.value) for e in events.Scalars("eval/loss")] == [(2, 5.25)]


def test_without_tensorboard_there_is_one_file(tmp_path):
    log = LogConfig(tensorboard=False)
    with MetricsWriter(tmp_path, log, num_steps=1, console=_plain()) as metrics:
        metrics.log(1, loss=1.0)
    assert [f.name for f in tmp_path.iterdir()] == ["metrics.jsonl"]


def write_rows(folder, steps, *, done=0, tensorboard=False):
    log = LogConfig(tensorboard=tensorboard)
    with MetricsWriter(folder, log, num_steps=9, done=done, console=_plain()) as metrics:
        for step in steps:
            metrics.log(step, loss=float(100 * done + step))


def rows_of(path):
    rows = map(json.loads, path.read_text().splitlines())
    return [(row["step"], row["loss"]) for row in rows]


def test_a_run_that_goes_on_has_each_step_once(tmp_path):
    write_rows(tmp_path, [1, 2, 3, 4], tensorboard=True)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')  # killed
    write_rows(tmp_path, [3, 4], done=2, tensorboard=True)
    expected = [(1, 1.0), (2, 2.0), (3, 203.0), (4, 204.0)]
    assert rows_of(tmp_path / "metrics.jsonl") == expected
    scalars = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in scalars] == expected


def test_metrics_of_a_run_that_began_here_before_are_kept(tmp_path):
    for number in range(3):
        write_rows(tmp_path, [1, 2 + number])
    assert rows_of(tmp_path / "metrics-1.jsonl") == [(1, 1.0), (2, 2.0)]
    assert rows_of(tmp_path / "metrics-2.jsonl") == [(1, 1.0), (3, 3.0)]
    assert rows_of(tmp_path / "metrics.jsonl") == [(1, 1.0), (4, 4.0)]


def test_a_killed_run_leaves_whole_rows(tmp_path):
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from train.config import LogConfig\n"
        "from train.metrics import MetricsWriter\n"
        "metrics = MetricsWriter(Path(sys.argv[1]), LogConfig(tensorboard=False), num_steps=9)\n"
        "for step in range(1, 6):\n"
        "    metrics.log(step, loss=1 / step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_plain_lines_where_there_is_no_terminal(tmp_path):
    console = _plain()
    with MetricsWriter(tmp_path, LogConfig(every=10), num_steps=25, console=console) as metrics:
        metrics.print("a [bracketed] sample")
        for step in range(1, 26):
            held_out = {"eval_loss": 2.5, "eval_bits_per_byte": 3.607} if step == 15 else {}
            metrics.log(
                step,
                loss=3.0,
                tokens_per_s=12345.6,
                step_time_s=2.0,
                expert_load_max=1.5,
                **held_out,
            )
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "a [bracketed] sample"
    assert [line.split()[1] for line in lines[1:]] == ["1/25", "10/25", "15/25", "20/25", "25/25"]
    assert lines[2] == (
        "step 10/25  loss 3.000  12,346 tokens/s  2.000 s/step  expert load 1.5x  eta 0:00:30"
    )
    assert "held-out loss 2.500  3.607 bits/byte" in lines[3]


def test_bar_on_a_terminal(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with MetricsWriter(tmp_path, LogConfig(), num_steps=4, console=console) as metrics:
        metrics.log(1, loss=3.0)
        metrics._live.refresh()
        shown = console.file.getvalue()
        assert "step 1/4  loss 3.000  eta ?" in shown
        assert "\u2501" * 20 in shown
        metrics.log(4, loss=2.0)
    assert "step 4/4  loss 2.000" in console.file.getvalue()


def test_expert_load():
    load = np.array([[4.0, 4, 4, 4], [16, 0, 0, 0], [2, 6, 4, 4]])
    assert expert_load_metrics(load) == {
        "expert_load_max": 4.0,
        "expert_load_min": 0.0,
        "dead_experts": 3,
    }


def _plain() -> Console:
    return Console(file=io.StringIO(), width=80)
