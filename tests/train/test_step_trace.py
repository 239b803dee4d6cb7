"""Traces of some steps: they are written, name their steps, and change nothing."""

import gzip
import json

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as counters

from train.config import ProfileConfig
from train.step_trace import StepTrace

STEPS = 6


def train(profile, folder, *, done=0, fails_at=None):
    """(values after each step, lines said) of a small program under a trace."""
    said, values = [], []
    weight = torch.arange(16.0).reshape(4, 4).to(torch_xla.device())
    with StepTrace(profile, folder, said.append) as trace:
        for step in range(done + 1, STEPS + 1):
            with trace.around(step):
                weight = weight @ weight.T / weight.norm()
                torch_xla.sync()
                if step == fails_at:
                    raise RuntimeError("some failure")
            if trace.is_edge(step):
                torch_xla.sync(wait=True)
                trace.done(step)
            values.append(weight)
        values = [value.cpu() for value in values]
    return values, said


def traced_steps(folder):
    """Numbers of the steps on the timelines below `folder`."""
    steps = set()
    for file in folder.rglob("*.trace.json.gz"):
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        marks = (event for event in events if event.get("name") == "train_step")
        steps |= {int(event["args"]["step_num"]) for event in marks}
    return steps


def test_steps_are_traced_and_nothing_else_changes(tmp_path):
    train(ProfileConfig(), tmp_path)  # compiles
    compiled = counters.counter_value("UncachedCompile")
    plain, said = train(ProfileConfig(), tmp_path)
    assert said == [] and not list(tmp_path.iterdir())
    traced, said = train(ProfileConfig(first=3, last=4), tmp_path / "profile")
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    assert counters.counter_value("UncachedCompile") == compiled
    assert traced_steps(tmp_path / "profile") == {3, 4}
    assert list(tmp_path.rglob("*.xplane.pb"))
    (line,) = said
    assert line.startswith(f"trace of steps 3 to 4 in {tmp_path / 'profile'}: pip install xprof")
    assert "ui.perfetto.dev" in line


@pytest.mark.parametrize(
    ("done", "steps"), [(4, {5}), (5, set())], ids=["within the trace", "after it"]
)
def test_a_run_that_goes_on_traces_what_is_left(done, steps, tmp_path):
    _, said = train(ProfileConfig(first=3, last=5), tmp_path, done=done)
    assert traced_steps(tmp_path) == steps and len(said) == bool(steps)


def test_a_run_that_ends_within_its_trace_keeps_it(tmp_path):
    with pytest.raises(RuntimeError, match="some failure"):
        train(ProfileConfig(first=2, last=9), tmp_path, fails_at=3)
    assert traced_steps(tmp_path) == {2, 3}
    # Another trace can begin.
    _, said = train(ProfileConfig(first=6, last=9), tmp_path)
    assert said[0].startswith("trace of steps 6 to 6 in")


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        (-1, 0, "profile.first = -1: give at least 0"),
        (5, 4, "profile.last = 4: give a step from profile.first = 5 on"),
        (0, 4, "profile.last = 4: give a step from profile.first = 0 on, or neither"),
    ],
)
def test_steps_in_no_order_are_refused(first, last, message):
    with pytest.raises(ValueError, match=message):
        ProfileConfig(first=first, last=last)
