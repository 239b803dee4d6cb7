"""Where numbers, pictures and texts end up."""

import json
import signal
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train.config import LogConfig
from train.metrics.sinks import Files, TensorBoard, open_sinks


def fill(sink):
    sink.scalars(1, {"loss": 5.5, "grad_norm": float("nan")})
    sink.scalars(2, {"loss": 5.0, "grad_norm": 1.0, "eval_loss": 5.25, "dead_experts": 3})
    pixels = np.zeros((2, 3, 3), dtype=np.uint8)
    pixels[0, 2] = (255, 0, 0)
    sink.picture(2, "expert_load", pixels)
    sink.text(2, "sample", "<a> & b")
    sink.close()


def test_files(tmp_path):
    fill(Files(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": 1, "loss": 5.5, "grad_norm": None},
        {"step": 2, "loss": 5.0, "grad_norm": 1.0, "eval_loss": 5.25, "dead_experts": 3},
    ]
    assert imread(tmp_path / "expert_load.png")[0, 2, :3].tolist() == [1, 0, 0]
    assert (tmp_path / "sample.txt").read_text() == "--- step 2\n<a> & b\n"


def test_tensorboard(tmp_path):
    fill(TensorBoard(tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 5.5), (2, 5.0)]
    assert [(e.step, e.value) for e in events.Scalars("eval/loss")] == [(2, 5.25)]
    (image,) = events.Images("train/expert_load")
    assert (image.step, image.height, image.width) == (2, 2, 3)
    (text,) = events.Tensors("sample/text_summary")
    assert b"<a> & b" in text.tensor_proto.string_val[0]


def test_wandb(tmp_path, monkeypatch):
    logged, begun = [], {}

    class Run:
        def log(self, values, step):
            logged.append((step, values))

        def finish(self):
            logged.append("finished")

    def init(**arguments):
        begun.update(arguments)
        return Run()

    wandb = ModuleType("wandb")
    wandb.init = init
    wandb.Image = lambda pixels: ("image", pixels.shape)
    wandb.Html = lambda text: ("html", text)
    wandb.__spec__ = SimpleNamespace(name="wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "config.json").write_text('{"steps": 2}')
    files, sink = open_sinks(tmp_path, LogConfig(tensorboard=False, wandb="mine"))
    files.close()
    fill(sink)
    assert begun["project"] == "mine" and begun["config"] == {"steps": 2}
    assert (begun["name"], begun["dir"]) == (tmp_path.name, str(tmp_path))
    assert logged[1][1]["eval/loss"] == 5.25 and logged[1][1]["train/dead_experts"] == 3
    assert logged[2] == (2, {"train/expert_load": ("image", (2, 3, 3))})
    assert logged[3] == (2, {"sample": ("html", "<pre>&lt;a&gt; &amp; b</pre>")})
    assert logged[4] == "finished"


def test_without_tensorboard_there_is_one_file(tmp_path):
    for sink in open_sinks(tmp_path, LogConfig(tensorboard=False)):
        sink.scalars(1, {"loss": 1.0})
        sink.close()
    assert [f.name for f in tmp_path.iterdir()] == ["metrics.jsonl"]


def write_rows(folder, steps, *, done=0, tensorboard=False):
    sinks = open_sinks(folder, LogConfig(tensorboard=tensorboard), done)
    for sink in sinks:
        for step in steps:
            sink.scalars(step, {"loss": float(100 * done + step)})
        sink.close()


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
        "from train.metrics.sinks import Files\n"
        "files = Files(Path(sys.argv[1]))\n"
        "for step in range(1, 6):\n"
        "    files.scalars(step, {'loss': 1 / step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.DEVNULL)
    assert done.returncode == -signal.SIGKILL
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
