"""Rows, and whole runs from the command line in processes of their own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from train.loop import _Pending
from train.metrics import Rates

REPOSITORY = Path(__file__).parents[2]
MICRO = (
    "--mesh.fsdp 2 --data.batch_size 4 --data.sequence_length 32 --optim.warmup_steps 1 "
    "--model.hidden_size 32 --model.intermediate_size 32 --model.head_dim 8 "
    "--model.global_head_dim 16 --model.num_experts 4 --model.moe_intermediate_size 32 "
    "--model.num_hidden_layers 2 --model.layer_types sliding_attention full_attention"
).split()


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

        def expert_load(self, step, load):
            rows.append((step, load.shape))

    load = torch.tensor([[2.0, 6.0], [4.0, 4.0]])
    output = {"loss": torch.tensor(2.0), "expert_load": load, "router_entropy": load[0]}
    rates = Rates(tokens_per_step=64, flops_per_chip=4 * 10**12, peak_flops=8e12)
    pending = _Pending(3, output, {"data_wait_s": 0.5}, rates)
    assert pending.log(Metrics(), begun=8.0, evaluate=evaluate) == 10
    assert rows == [
        {"step": 3, "loss": 2.0, "step_time_s": 2, "eval_loss": 5.0, "data_wait_s": 0.5}
        | {"tokens_per_s": 32, "tflops_per_chip": 2, "mfu": 0.25}
        | {"expert_load_max": 1.5, "expert_load_min": 0.5, "dead_experts": 0, "router_entropy": 4},
        (3, (2, 2)),
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
    options = "--name micro --steps 6 --eval.every 3 --eval.batches 2 --sample.length 4"
    options = [*options.split(), "--sample.every", "2"]
    return folder / "micro", train(folder, *options)


@pytest.mark.slow
def test_a_run_writes_a_row_a_step(finished):
    rows = rows_of(finished[0])
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    numbers = ("loss", "cross_entropy", "grad_norm", "tokens_per_s", "step_time_s", "learning_rate")
    numbers += ("parameter_norm", "z_loss", "load_balance_loss", "router_z_loss", "router_entropy")
    numbers += ("tflops_per_chip", "trace_time_s", "compile_time_s", "host_memory_bytes")
    for row in rows:
        assert row["trace_time_s"] < row["step_time_s"] and row["data_wait_s"] >= 0
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
    assert counts[1] == counts[0]  # reading the numbers of a step runs no other program
    assert counts[2] == counts[1] + 1  # four tokens drawn after step 2: one program
    assert counts[3] == counts[2] + 1  # evaluated after step 3
    assert counts[5] == counts[4] == counts[3]  # the second sample is the first one's program


@pytest.mark.slow
def test_a_run_leaves_its_config_and_ends_with_a_sample(finished):
    run, text = finished
    config = json.loads((run / "config.json").read_text())
    assert config["name"] == "micro" and config["model"]["num_experts"] == 4
    assert list(run.glob("events.out.tfevents.*"))
    plan, progress = text.split("step 1/6", 1)
    assert re.search(r"^ *expert_mlp, gmm, tgmm +Pallas, interpreted as HLO", plan, re.MULTILINE)
    _, *samples = progress.split("\nsample:\n")
    assert "step 3/6" in samples[0] and "held-out loss" in samples[0]
    assert len(samples) == 3 and all(sample.startswith("def ") for sample in samples)
    assert "step 6/6" in samples[1]
    assert (run / "sample.txt").read_text().startswith("--- step 2\ndef ")
    assert (run / "expert_load.png").stat().st_size > 1000
    assert f"metrics, TensorBoard scalars and config go to {run}" in plan


@pytest.mark.slow
def test_torchrun_with_one_process_trains(tmp_path):
    """More than one is refused: test_launch.py."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=1", "-m"]
    options = (
        "--name launched --steps 2 --eval.every 0 --sample.length 0 --log.no_tensorboard "
        "--data.packing fit --data.restart_positions --profile.first 2 --profile.last 2".split()
    )
    text = train(tmp_path, *options, launcher=launcher)
    assert "step 2/2" in text and "sample" not in text
    assert "trace of steps 2 to 2 in" in text
    assert list((tmp_path / "launched" / "profile").rglob("*.xplane.pb"))
    rows = rows_of(tmp_path / "launched")
    assert [row["step"] for row in rows] == [1, 2]
    assert not any("eval_loss" in row for row in rows)
