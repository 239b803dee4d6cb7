"""A run's folder, and what a person sees; nothing is overwritten."""

import io
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train.config import CheckpointConfig, LogConfig, RunConfig
from train.metrics import MetricsWriter, create_run_directory
from train.presets import cpu_tiny


def config_in(folder: Path, **log) -> RunConfig:
    return replace(cpu_tiny(), log=LogConfig(dir=str(folder / "runs"), **log))


def plain() -> Console:
    return Console(file=io.StringIO(), width=80)


# The folder


@pytest.mark.parametrize(
    "changes",
    [{"resume": "never"}, {"checkpoint": CheckpointConfig(every_minutes=0, every_steps=0)}],
)
def test_the_folder_of_a_run_that_cannot_go_on_is_never_reused(tmp_path, changes):
    config = replace(config_in(tmp_path), **changes)
    made = [create_run_directory(config) for _ in range(3)]
    assert [d.name for d in made] == ["cpu_tiny", "cpu_tiny-2", "cpu_tiny-3"]


def test_a_run_that_may_go_on_has_one_folder(tmp_path):
    config = config_in(tmp_path)
    made = [create_run_directory(config) for _ in range(2)]
    assert made == [tmp_path / "runs" / "cpu_tiny"] * 2


def test_run_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ValueError, match=r"log\.dir = .*no folder can be made there \(File exists"):
        create_run_directory(config_in(tmp_path))


def test_a_missing_package_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"log\.wandb = 'mine' needs .*install -e '\.\[wandb\]'"):
        create_run_directory(config_in(tmp_path, wandb="mine"))
    assert not (tmp_path / "runs").exists()


# Lines


def test_plain_lines_where_there_is_no_terminal(tmp_path):
    console = plain()
    with MetricsWriter(tmp_path, LogConfig(every=10), num_steps=25, console=console) as metrics:
        metrics.print("a [bracketed] line")
        for step in range(1, 26):
            held_out = {"eval_loss": 2.5, "eval_bits_per_byte": 3.607} if step == 15 else {}
            metrics.log(
                step,
                loss=3.0,
                tokens_per_s=12345.6,
                step_time_s=2.0,
                expert_load_min=0.25,
                expert_load_max=1.5,
                dead_experts=0,
                data_wait_s=0.01,
                **held_out,
            )
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "a [bracketed] line"
    assert [line.split()[1] for line in lines[1:]] == ["1/25", "10/25", "15/25", "20/25", "25/25"]
    assert lines[2] == (
        "step 10/25  loss 3.000  12,346 tokens/s  2.000 s/step  experts 0.2 to 1.5  eta 0:00:30"
    )
    assert "held-out loss 2.500  3.607 bits/byte" in lines[3]


def test_trouble_is_in_the_line(tmp_path):
    console = plain()
    with MetricsWriter(tmp_path, LogConfig(), num_steps=1, console=console) as metrics:
        load = {"expert_load_min": 0, "expert_load_max": 9.0, "dead_experts": 3}
        metrics.log(1, **load, mfu=0.412, data_wait_s=0.5, step_time_s=2.0)
    shown = console.file.getvalue()
    assert "MFU 41.2%  experts 0.0 to 9.0  3 dead  waiting for data 25%" in shown


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


def test_a_number_that_is_none_is_shown(tmp_path):
    console = plain()
    with MetricsWriter(tmp_path, LogConfig(), num_steps=1, console=console) as metrics:
        metrics.log(1, loss=math.nan, expert_load_min=math.nan, expert_load_max=math.nan)
    assert re.search(r"loss nan  experts nan to nan", console.file.getvalue())


# Pictures and samples


def test_heat_maps_are_drawn_every_so_often_and_at_the_end(tmp_path):
    log = LogConfig(heat_map_every=4)
    with MetricsWriter(tmp_path, log, num_steps=9, console=plain()) as metrics:
        for step in range(1, 10):
            metrics.expert_load(step, np.ones((2, 4)))
    images = EventAccumulator(str(tmp_path)).Reload().Images("train/expert_load")
    assert [image.step for image in images] == [4, 8, 9]
    log = LogConfig(heat_map_every=0, tensorboard=False)
    (tmp_path / "none").mkdir()
    with MetricsWriter(tmp_path / "none", log, num_steps=1, console=plain()) as metrics:
        metrics.expert_load(1, np.ones((2, 4)))
    assert [f.name for f in (tmp_path / "none").iterdir()] == ["metrics.jsonl"]


def test_samples_are_printed_and_kept(tmp_path):
    console = plain()
    with MetricsWriter(tmp_path, LogConfig(), num_steps=9, console=console) as metrics:
        metrics.sample(4, "once upon")
        metrics.sample(9, "a [time]")
    assert console.file.getvalue() == "sample:\nonce upon\nsample:\na [time]\n"
    kept = (tmp_path / "sample.txt").read_text()
    assert kept == "--- step 4\nonce upon\n--- step 9\na [time]\n"
