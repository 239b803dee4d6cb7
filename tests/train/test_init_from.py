"""First weights from a folder: exact on a mesh, refused by name, read once."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from tests.torch_gemma4.checkpoints import assert_same, build, load_folder
from tests.train import init_from_worker
from torch_gemma4 import hf
from torch_gemma4.config import Gemma4Config
from torch_gemma4.hf_names import PUBLISHED_PREFIX, TEXT_ONLY_PREFIX
from torch_gemma4.layer_spec import LayerOverride
from torch_gemma4.presets import micro
from train import init_from
from train.__main__ import Info, Run, main, parse
from train.config import CheckpointConfig
from train.export import export
from train.loop import _take_weights
from train.presets import PRESETS, cpu_tiny
from train.run_folder import begins

MODEL = replace(micro(), vocab_size=256)


@pytest.fixture
def folder(tmp_path):
    hf.save_pretrained(build(MODEL, seed=0), tmp_path / "model", max_shard_bytes=200_000)
    return tmp_path / "model"


def run_config(folder, **model):
    return replace(
        cpu_tiny(), model=replace(MODEL, load_balance_loss_weight=0.1, **model), init_from=folder
    )


# On a mesh


@pytest.mark.slow
def test_a_mesh_takes_in_a_folder_and_gives_it_back_bit_for_bit(folder, tmp_path):
    bf16, options = tmp_path / "bf16", {"dtype": torch.bfloat16, "prefix": TEXT_ONLY_PREFIX}
    hf.save_pretrained(build(MODEL, seed=1), bf16, **options)
    done = subprocess.run(
        [sys.executable, "-m", init_from_worker.__name__, str(folder), str(bf16)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for line in done.stdout.splitlines():
        read, parameter = map(int, line.split())
        assert read < parameter / 2  # a layer's tensor, or rows of it
    for original, dtype in ((folder, torch.float32), (bf16, torch.bfloat16)):
        out = tmp_path / "out" / original.name
        export(f"{original}-checkpoints/step-00000001", out, dtype=dtype)
        expected = load_folder(original)
        expected = {
            name.replace(PUBLISHED_PREFIX, TEXT_ONLY_PREFIX): t for name, t in expected.items()
        }
        assert_same(load_folder(out), expected)


# Refusals


def test_a_folder_that_fits_is_accepted(folder):
    init_from.refuse_unfit_weights(run_config(str(folder)))


def test_a_model_said_in_another_way_is_the_same(tmp_path):
    model = replace(MODEL, per_layer=(LayerOverride(layer=1, head_dim=12),))
    hf.save_pretrained(build(model, seed=0), tmp_path / "model")
    assert Gemma4Config.from_hf_file(tmp_path / "model") != model
    config = replace(cpu_tiny(), model=model, init_from=str(tmp_path / "model"))
    init_from.refuse_unfit_weights(config)


def test_another_model_is_told_field_by_field(folder):
    config = run_config(str(folder), num_experts=8, layer_types=micro().layer_types[::-1])
    message = (
        f"init_from: {folder} holds another model: model.layer_types; model.num_experts = 8 here, "
        f"4 there. Give --model_from {folder} to train the one it holds"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        init_from.refuse_unfit_weights(config)


def test_missing_and_unread_tensors_are_named(folder):
    (folder / "model.safetensors.index.json").unlink()
    tensors = load_folder(folder)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    tensors["model.language_model.norm.wait"] = tensors.pop("model.language_model.norm.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"^init_from: .*missing 1 .*norm\.weight; nothing reads"):
        init_from.refuse_unfit_weights(run_config(str(folder)))


def test_a_folder_that_is_not_there_is_refused_before_the_run_has_one(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("train.loop.prepare_environment", lambda mesh: None)
    with pytest.raises(SystemExit) as exit_:
        main(f"--init_from {tmp_path}/none --log.dir {tmp_path}/runs".split())
    assert exit_.value.code == 2
    assert f"error: init_from: {tmp_path}/none" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_two_sets_of_first_weights_are_refused():
    checkpoint = CheckpointConfig(start_from="runs/a/checkpoints/step-00000001")
    with pytest.raises(ValueError, match=r"init_from = 'b': .*start_from = 'runs/a/.*one of the"):
        replace(cpu_tiny(), init_from="b", checkpoint=checkpoint)


# Read once


def test_a_run_begins_unless_it_has_a_checkpoint(tmp_path):
    config = cpu_tiny()
    config = replace(config, log=replace(config.log, dir=str(tmp_path)))
    assert begins(config)
    step = tmp_path / "cpu_tiny/checkpoints/step-00000003"
    step.mkdir(parents=True)
    assert begins(config)  # not finished
    (step / "checkpoint.json").touch()
    assert not begins(config)
    assert begins(replace(config, resume="never"))
    off = CheckpointConfig(every_minutes=0, every_steps=0)
    assert begins(replace(config, checkpoint=off))


@pytest.mark.parametrize("done", [0, 7])
def test_weights_are_read_where_the_run_begins_and_a_line_tells(done, capsys, monkeypatch):
    read = []
    monkeypatch.setattr(init_from, "load_weights", lambda *arguments: read.append(arguments))

    class Mesh:
        place_whole = None

    _take_weights(run_config("/w"), None, Mesh(), None, done, Console())
    assert len(read) == (not done)
    lines = {
        0: "weights: /w\n",
        7: "init_from is not read: the weights of /w were where this run began\n",
    }
    assert capsys.readouterr().out == lines[done]


# The model of a folder


def test_model_from_takes_the_model_and_not_how_it_is_trained(folder):
    for path in (folder, folder / "config.json"):
        command = parse(Run, ["--model_from", str(path), "--model.num_loss_tiles", "2"])
        preset = cpu_tiny().model
        assert command.config.model == replace(MODEL.trained_as(preset), num_loss_tiles=2)
        assert command.config.model.load_balance_loss_weight == preset.load_balance_loss_weight
        assert command.config.data == cpu_tiny().data
    assert parse(Info, [f"--model-from={folder}"]).config.model.num_experts == 4


def test_what_depends_on_the_model_is_checked_with_all_options(tmp_path):
    hf.save_pretrained(build(micro(), seed=0), tmp_path / "model")  # has 64 ids
    arguments = ["--model_from", str(tmp_path / "model")]
    with pytest.raises(ValueError, match="the byte tokenizer has 256 ids"):
        parse(Run, arguments)
    assert parse(Run, [*arguments, "--data.source", "synthetic"]).config.model.vocab_size == 64


def test_a_config_that_is_none_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(SystemExit) as exit_:
        main(["info", "--model_from", str(tmp_path)])
    assert exit_.value.code == 2
    assert "model_type = 'llama'" in capsys.readouterr().err


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_model_of_its_own_config_json(preset, tmp_path):
    model = PRESETS[preset]().model
    (tmp_path / "config.json").write_text(json.dumps(model.to_hf_dict()))
    found = parse(Run, ["--preset", preset, "--model_from", str(tmp_path)])
    assert found.config == PRESETS[preset]()
