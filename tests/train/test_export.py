"""Weights of a checkpoint as a folder of safetensors: bit for bit, in bounded memory, whole or
not at all."""

import errno
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.torch_gemma4.checkpoints import assert_same, build, load_folder
from tests.train.checkpoint_run import Data, damage
from torch_gemma4 import hf
from torch_gemma4.config import Gemma4Config
from torch_gemma4.hf_names import PUBLISHED_PREFIX, TEXT_ONLY_PREFIX, hf_to_ours
from torch_gemma4.layer_spec import LayerOverride
from torch_gemma4.presets import micro
from train import export as module
from train.checkpoint.checkpointer import Checkpointer
from train.checkpoint.pieces import read_pieces
from train.exit_codes import StorageFailure
from train.export import export, size_in_bytes
from train.hosts import Hosts
from train.presets import cpu_tiny

REPOSITORY = Path(__file__).parents[2]
MODEL = replace(
    micro(),
    vocab_size=256,
    attention_bias=True,
    tie_word_embeddings=False,
    pad_token_id=0,
    per_layer=(LayerOverride(layer=1, head_dim=12),),
)


def save(folder, model, **data):
    """Address of a checkpoint with the weights of `model` and a moment, as a run would write it."""
    config = replace(cpu_tiny(), model=model.config, data=replace(cpu_tiny().data, **data))
    tensors = {f"model/{name}": p.detach() for name, p in model.named_parameters()}
    tensors["optimizer/moment"] = torch.full((3, 4), torch.nan)
    checkpointer = Checkpointer(
        config,
        str(folder),
        Hosts(),
        tensors,
        Data(),
        lambda tensor: tensor,
        lambda name, tensor: tensor,
        lambda line: None,
    )
    checkpointer.save(3)
    checkpointer.wait()
    return f"{folder}/step-00000003"


@pytest.fixture(scope="module")
def model():
    return build(MODEL, seed=0)


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    return save(tmp_path_factory.mktemp("run"), model)


def test_what_is_exported_is_what_was_trained(model, checkpoint, tmp_path, capsys):
    export(checkpoint, tmp_path / "out", max_shard_size="200KB")
    expected = dict(hf.export_tensors(MODEL, model.get_parameter, prefix=TEXT_ONLY_PREFIX))
    assert_same(load_folder(tmp_path / "out"), expected)
    assert Gemma4Config.from_hf_file(tmp_path / "out").layers == MODEL.layers
    again = build(MODEL)
    hf.load_pretrained(again, tmp_path / "out")
    assert_same(again.state_dict(), model.state_dict())
    shards = sorted(path.name for path in (tmp_path / "out").glob("model-*"))
    assert len(shards) == 3 and shards[0] == "model-00001-of-00003.safetensors"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert capsys.readouterr().out == (
        f"{tmp_path}/out: {len(expected)} tensors, float32, 538.9 kB\n"
        "tokenizer: the byte tokenizer, which has no file\n"
    )


def test_files_are_those_of_save_pretrained_byte_for_byte(model, checkpoint, tmp_path):
    options = {"dtype": torch.bfloat16}
    export(checkpoint, tmp_path / "a", max_shard_size="0.1 MB", form="published", **options)
    hf.save_pretrained(
        model, tmp_path / "b", max_shard_bytes=100_000, prefix=PUBLISHED_PREFIX, **options
    )
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert len(names) == 5
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.parametrize("split", [False, True])
def test_pieces_of_any_mesh_come_together(split, tmp_path, monkeypatch):
    """As devices leave them: a parameter in slices along any dimension."""
    model = build(replace(MODEL, split_expert_weights=split), seed=0)

    def cut(folder, names, take):
        for number, name in enumerate(names):
            tensor = model.get_parameter(name.removeprefix("model/")).detach()
            dim = number % tensor.ndim
            if name.endswith("_halves"):  # unequal parts of experts; for another, of columns
                dim = 3 + ("down" in name)
            size = -(-tensor.shape[dim] // 3)
            for start in range(0, tensor.shape[dim], size):
                piece = tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))
                offsets = [0] * tensor.ndim
                offsets[dim] = start
                take(name, torch.Size(offsets), piece)

    monkeypatch.setattr(module, "read_pieces", cut)
    export(save(tmp_path / "run", model), tmp_path / "out")
    expected = dict(hf.export_tensors(model.config, model.get_parameter, prefix=TEXT_ONLY_PREFIX))
    assert_same(load_folder(tmp_path / "out"), expected)


def test_one_piece_is_in_memory_at_a_time(model, checkpoint):
    alive, most, names = 0, 0, []

    def gone():
        nonlocal alive
        alive -= 1

    def take(name, offsets, piece):
        nonlocal alive, most
        assert torch.equal(piece, model.get_parameter(name.removeprefix("model/")))
        alive += 1
        most = max(most, alive)
        names.append(name)
        weakref.finalize(piece, gone)

    wanted = [f"model/{name}" for name, _ in model.named_parameters()]
    read_pieces(checkpoint, wanted, take)
    assert (sorted(names), most) == (sorted(wanted), 1)


def test_without_torch_xla_or_jax(checkpoint, tmp_path):
    code = (
        "import sys; sys.modules['torch_xla'] = sys.modules['jax'] = None\n"
        "from train.__main__ import main; main(sys.argv[1:])"
    )
    arguments = f"export --checkpoint {checkpoint} --out {tmp_path}/out --dtype bfloat16".split()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr
    tensors = load_folder(tmp_path / "out")
    assert set(tensors) == set(hf_to_ours(MODEL, prefix=TEXT_ONLY_PREFIX))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


# The tokenizer


@pytest.mark.parametrize("name", ["tokenizer.json", "other.json", "sp.model", "gone.json"])
def test_the_tokenizer_goes_along(name, tmp_path, capsys):
    path = tmp_path / name
    if name != "gone.json":
        path.write_text(name)
    tokenizer = replace(cpu_tiny().data.tokenizer, path=str(path))
    checkpoint = save(tmp_path / "run", build(micro(), seed=0), tokenizer=tokenizer)
    export(checkpoint, tmp_path / "out")
    copied = {p.name: p.read_text() for p in (tmp_path / "out").glob("tokenizer*")}
    line = capsys.readouterr().out.splitlines()[1]
    expected = {
        "tokenizer.json": {"tokenizer.json": "tokenizer.json"},
        "other.json": {"tokenizer.json": "other.json"},
        "sp.model": {"tokenizer.model": "sp.model"},
    }
    assert copied == expected.get(name, {})
    if name == "gone.json":
        assert line == (
            f"tokenizer: {path} is not on this host: copy it into the folder as tokenizer.json"
        )


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": "/none/step-00000003"}, "checkpoint = '/none/step-00000003': no finished"),
        ({"max_shard_size": "5 parsecs"}, "max_shard_size = '5 parsecs': give a size such as 5GB"),
        ({"max_shard_size": "0GB"}, "max_shard_size = '0GB': give a size"),
    ],
)
def test_impossible_options_are_refused_by_name(checkpoint, options, message, tmp_path):
    options = {"checkpoint": checkpoint, "out": tmp_path / "out"} | options
    with pytest.raises(ValueError, match=message):
        export(**options)
    assert list(tmp_path.iterdir()) == []


def test_the_published_form_needs_a_padding_id(tmp_path):
    checkpoint = save(tmp_path / "run", build(replace(micro(), vocab_size=256), seed=0))
    with pytest.raises(ValueError, match=r"form = 'published': .* has no model\.pad_token_id"):
        export(checkpoint, tmp_path / "out", form="published")


def test_sizes():
    sizes = ["7", "5GB", "0.5 mb", "2TB", "3KB"]
    assert [size_in_bytes("f", s) for s in sizes] == [7, 5 * 10**9, 500_000, 2 * 10**12, 3000]


def test_a_folder_that_is_there_is_left_alone(checkpoint, tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(ValueError, match=r"already exists and is not empty; give a new folder"):
        export(checkpoint, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_full_disk_is_told_before_anything_is_copied(checkpoint, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ValueError, match=r"out = .*: cannot be written \(No space left on device"):
        export(checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_leaves_nothing_behind(model, tmp_path):
    checkpoint = save(tmp_path / "run", model)
    damage(str(tmp_path / "run"), 3)
    with pytest.raises(StorageFailure, match=r"step-00000003 is damaged: __0_0\.distcp does not"):
        export(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_another_weight_layout_is_refused(model, tmp_path, monkeypatch):
    checkpoint = save(tmp_path / "run", model)
    monkeypatch.setattr("train.checkpoint.compatibility.LAYOUTS", ("stacked-9",))
    with pytest.raises(
        ValueError, match=r"has weight layout '.*', and this program reads 'stacked-9"
    ):
        export(checkpoint, tmp_path / "out")


def test_a_config_survives_json():
    assert (
        Gemma4Config.from_dict(json.loads(replace(cpu_tiny(), model=MODEL).to_json())["model"])
        == MODEL
    )
    with pytest.raises(TypeError, match="num_expert"):
        Gemma4Config.from_dict(cpu_tiny().to_dict()["model"] | {"num_expert": 3})
