"""The compile watch, rows, and whole runs from the command line in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from train.loop import CompileWatch, _Pending

REPOSITORY = Path(__file__).parents[2]
MICRO = (
    "--mesh.fsdp 2 --data.batch_size 4 --data.sequence_length 32 --optim.warmup_steps 1 "
    "--model.hidden_size 32 --model.intermediate_size 32 --model.head_dim 8 "
    "--model.global_head_dim 16 --model.num_experts 4 --model.moe_intermediate_size 32 "
    "--model.num_hidden_layers 2 --model.layer_types sliding_attention full_attention"
).split()


# The compile watch


def step(*shape, factor=1):
    """A training step on the real device: one program a shape (and a Python number)."""
    batch = {"input_ids": np.zeros((3, 5), np.int32), "labels": np.zeros(shape, np.int32)}
    (torch.zeros(shape).to("xla") * 3).sum(dim=0, keepdim=factor > 1).cpu()
    return batch


def test_steps_of_one_shape_compile_once_and_another_shape_is_an_error():
    watch = CompileWatch()
    before = watch.count
    for number in range(1, 6):
        watch.check_step(number, step(7, 1013))
    assert watch.count == before + 1
    message = (
        rf"step 6 compiled the training step again \({before + 2} compilations\). "
        r"Changed shapes: labels \(7, 1013\) -> \(7, 1014\)$"
    )
    batch = step(7, 1014)
    with pytest.raises(RuntimeError, match=message):
        watch.check_step(6, batch)


def test_a_program_that_changed_under_equal_shapes_says_so():
    watch = CompileWatch()
    for number in range(1, 4):
        watch.check_step(number, step(7, 1015))
    batch = step(7, 1015, factor=2)
    with pytest.raises(RuntimeError, match="shapes: none: a Python number became part of the prog"):
        watch.check_step(4, batch)


def test_warm_up_and_what_is_allowed_may_compile():
    watch = CompileWatch()
    watch.check_step(1, step(7, 1016))
    watch.check_step(2, step(7, 1017))
    step(7, 1018)  # an evaluation
    watch.allow()
    watch.check_step(3, step(7, 1017))
    batch = step(7, 1019)
    with pytest.raises(RuntimeError, match=r"step 4 .* labels \(7, 1016\) -> \(7, 1019\)"):
        watch.check_step(4, batch)


# Rows


def test_step_time_ends_where_the_evaluation_begins(monkeypatch):
    clock, rows = [10.0], []
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def evaluate():
        clock[0] += 100
        return {"eval_loss": 5.0}

    class Metrics:
        def log(self, step, **row):
            rows.append({"step": step} | row)

    pending = _Pending(3, {"loss": torch.tensor(2.0)}, 0.5, 1, num_tokens=64)
    assert pending.log(Metrics(), begun=8.0, evaluate=evaluate) == 10
    assert rows == [
        {"step": 3, "loss": 2.0, "tokens_per_s": 32, "step_time_s": 2, "eval_loss": 5.0}
        | {"data_wait_s": 0.5, "compilations": 1}
    ]


# Whole runs


def train(folder, *options, launcher=("-m",)):
    """Output of `python -m train` on a micro model over this package's own source."""
    # Compiling the interpreted kernels well takes three times as long.
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, *launcher, "train", *MICRO, "--log.dir", str(folder)]
    done = subprocess.run(
        [*command, "--data.path", "torch_gemma4", *options],
        capture_output=True,
        text=True,
        errors="replace",
        cwd=REPOSITORY,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder, printed text) of six steps with two evaluations and a sample."""
    folder = tmp_path_factory.mktemp("runs")
    options = "--name micro --steps 6 --eval.every 3 --eval.batches 2 --sample.length 4".split()
    return folder / "micro", train(folder, *options)


@pytest.mark.slow
def test_a_run_writes_a_row_a_step(finished):
    rows = rows_of(finished[0])
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    numbers = ("loss", "cross_entropy", "grad_norm", "tokens_per_s", "step_time_s", "learning_rate")
    for row in rows:
        assert all(row[name] > 0 for name in numbers)
        assert row["tokens_per_s"] == pytest.approx(4 * 32 / row["step_time_s"])
        assert row["expert_load_max"] >= 1 >= row["expert_load_min"] and row["dead_experts"] >= 0
    assert rows[0]["cross_entropy"] == pytest.approx(np.log(256), abs=0.5)
    assert rows[-1]["loss"] < rows[0]["loss"]
    evaluated = [row for row in rows if "eval_loss" in row]
    assert [row["step"] for row in evaluated] == [3, 6]
    assert evaluated[1]["eval_loss"] < evaluated[0]["eval_loss"] < 5.8


@pytest.mark.slow
def test_a_run_compiles_its_step_once_and_its_evaluation_once(finished):
    counts = [row["compilations"] for row in rows_of(finished[0])]
    assert counts[1] == counts[2]  # from the second step on, but for the first evaluation
    assert counts[3:] == [counts[2] + 1] * 3


@pytest.mark.slow
def test_a_run_leaves_its_config_and_ends_with_a_sample(finished):
    run, text = finished
    config = json.loads((run / "config.json").read_text())
    assert config["name"] == "micro" and config["model"]["num_experts"] == 4
    assert list(run.glob("events.out.tfevents.*"))
    plan, progress = text.split("step 1/6", 1)
    assert "gmm, tgmm         Pallas, interpreted as HLO" in plan
    steps, sample = progress.split("\nsample:\n")
    assert "step 6/6" in steps and "held-out loss" in steps
    assert sample.startswith("def ")
    assert f"metrics, TensorBoard scalars and config go to {run}" in plan


@pytest.mark.slow
def test_torchrun_with_one_process_trains(tmp_path):
    """More than one is refused: test_launch.py."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=1", "-m"]
    options = (
        "--name launched --steps 2 --eval.every 0 --sample.length 0 --log.no_tensorboard".split()
    )
    text = train(tmp_path, *options, launcher=launcher)
    assert "step 2/2" in text and "sample" not in text
    rows = rows_of(tmp_path / "launched")
    assert [row["step"] for row in rows] == [1, 2]
    assert not any("eval_loss" in row for row in rows)
