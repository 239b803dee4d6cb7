"""Saving beside the training, and going on from the newest whole checkpoint.

State here is of CPU tensors; test_checkpoint_mesh.py has those of a mesh.
"""

import json
import threading
import time
import uuid

import pytest
import torch

from tests.train.checkpoint_run import Run, damage, path_of
from train.checkpoint import saver
from train.config import RunConfig
from train.exit_codes import StorageFailure


def _without_split(config):
    fields = json.loads(config.to_json())
    del fields["model"]["split_expert_weights"]
    return fields


@pytest.fixture(params=["local", "memory"])
def address(request, tmp_path):
    return str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4()}"


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


def test_never_does_not_go_on(address):
    Run(address).save(2)
    with pytest.raises(ValueError, match=r"resume = 'never': .* has checkpoints of another run"):
        Run(address, resume="never").checkpointer.restore()


def test_a_run_may_begin_with_anothers_checkpoint(tmp_path):
    Run(tmp_path / "a", keep=9).save(2, 4, 6)
    start = f"{tmp_path}/a/step-00000004"
    run = Run(tmp_path / "b", start_from=start)
    assert run.restored() == 4
    run.save(5)
    assert Run(tmp_path / "b", start_from=start).restored() == 5  # its own come first
    assert Run(tmp_path / "a").restored() == 6
    for missing in (
        f"{tmp_path}/a/step-00000005",
        f"{tmp_path}/a",
        "step-00000004",
        f"{tmp_path}/a/4",
    ):
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
    monkeypatch.setattr("train.checkpoint.compatibility.LAYOUTS", ("stacked-2", "stacked-3"))
    message = (
        "step-00000004 has weight layout 'stacked-1', and this program reads 'stacked-2' and "
        r"'stacked-3'. Go on with the program that wrote it \(torch-gemma4 0.1.0\), or give "
        "another --name"
    )
    with pytest.raises(ValueError, match=message):
        Run(address).checkpointer.restore()
    monkeypatch.undo()
    assert Run(address).restored() == 4


@pytest.mark.parametrize("saved_split", [False, True])
def test_experts_whole_or_in_halves_are_converted_bit_for_bit(address, saved_split):
    """Weights and both moments, with their names and shapes in the model."""
    whole = torch.arange(2 * 3 * 8 * 6 * 5.0).view(2, 3, 8, 6, 5)
    forms = {False: whole, True: whole.view(2, 3, 2, 24, 5)}
    names = [
        f"{kind}/stack.segments.0.experts.{matrix}"
        for kind in ("model", "exp_avg", "exp_avg_sq")
        for matrix in ("gate_up", "down")
    ]
    for is_split in (saved_split, not saved_split):
        run = Run(address, model={"split_expert_weights": is_split})
        suffix = "_halves" if is_split else ""
        own = {name: torch.zeros(forms[is_split].shape) for name in names}
        run.tensors |= {name + suffix: tensor for name, tensor in own.items()}
        if is_split == saved_split:
            for number, name in enumerate(names):
                own[name].copy_(forms[is_split] + number)
            run.save(4)
    assert run.restored() == 4
    for number, name in enumerate(names):
        assert torch.equal(own[name], forms[not saved_split] + number)
    old, new = ("stacked-1-split-experts", "stacked-1")[:: 1 if saved_split else -1]
    assert run.told[1:] == [f"its weight layout '{old}' is converted to '{new}': no bit changed"]


def test_a_checkpoint_from_before_the_split_goes_on(address, monkeypatch):
    monkeypatch.setattr(RunConfig, "to_dict", _without_split)
    Run(address).save(4)
    monkeypatch.undo()
    run = Run(address)
    assert run.restored() == 4 and len(run.told) == 1


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
