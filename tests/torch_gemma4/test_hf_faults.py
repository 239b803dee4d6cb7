"""Every fault of a checkpoint folder is named before anything is copied, and a failed save leaves
nothing behind."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.torch_gemma4.checkpoints import assert_same, build, load_folder
from torch_gemma4 import hf
from torch_gemma4.hf_names import PUBLISHED_PREFIX
from torch_gemma4.model import Gemma4ForCausalLM
from torch_gemma4.presets import micro

# Faults of a folder


def test_a_missing_layer_scalar_is_never_made_up(checkpoint):
    folder, tensors = checkpoint
    name = f"{PUBLISHED_PREFIX}layers.3.layer_scalar"
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"missing 1 text tensors: {name}; use the config.json"):
        hf.load_pretrained(build(micro()), folder)


def test_an_unread_tensor_is_named(checkpoint):
    folder, tensors = checkpoint
    name = f"{PUBLISHED_PREFIX}layers.3.self_attn.sinks"
    save_file(tensors | {name: torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"nothing reads 1 text tensors: {name}; use"):
        hf.load_pretrained(build(micro()), folder)


def test_a_long_list_of_names_is_cut(checkpoint):
    folder, _ = checkpoint
    config = replace(micro(), attention_bias=True)  # four biases a local layer, three a global one
    with pytest.raises(ValueError, match=r"missing 22 text tensors: (\S+, ){4}\.\.\.; use"):
        hf.load_pretrained(build(config), folder)


def test_a_head_beside_a_tied_embedding_is_refused(checkpoint):
    folder, tensors = checkpoint
    head = {"lm_head.weight": tensors[f"{PUBLISHED_PREFIX}embed_tokens.weight"].clone()}
    save_file(tensors | head, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"holds lm_head.weight though tie_word_embeddings is true"
    ):
        hf.load_pretrained(build(micro()), folder)


def test_a_wrong_shape_is_named_before_anything_is_copied(checkpoint):
    folder, tensors = checkpoint
    name = f"{PUBLISHED_PREFIX}norm.weight"
    save_file(tensors | {name: torch.ones(33)}, folder / "model.safetensors")
    model = build(micro())
    with pytest.raises(ValueError, match=rf"{name} has shape \[33\], expected \[32\]; use the con"):
        hf.load_pretrained(model, folder)
    assert all(tensor.isnan().all() for tensor in model.state_dict().values())


def test_a_quantised_tensor_is_named(checkpoint):
    folder, tensors = checkpoint
    name = f"{PUBLISHED_PREFIX}norm.weight"
    save_file(tensors | {name: torch.ones(32, dtype=torch.int8)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} has dtype I8, expected one of F64, F32, F16, B"):
        hf.load_pretrained(build(micro()), folder)


def test_a_model_on_the_meta_device_is_refused(checkpoint):
    with torch.device("meta"):
        model = Gemma4ForCausalLM(micro())
    with pytest.raises(ValueError, match=r"embedding.weight is on the meta device .*to_empty"):
        hf.load_pretrained(model, checkpoint[0])


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor model.safetensors.in"):
        hf.load_pretrained(build(micro()), tmp_path)


def edit_index(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def remove_shard(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()


def truncate_shard(folder):
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def truncate_header(folder):
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def repeat_tensor(folder):
    path = folder / "model-00003-of-00003.safetensors"
    save_file(load_file(path) | {f"{PUBLISHED_PREFIX}embed_tokens.weight": torch.ones(1)}, path)


def promise_absent_tensor(folder):
    edit_index(folder, lambda names: names.update(ghost="model-00001-of-00003.safetensors"))


def misplace_tensor(folder):
    name = f"{PUBLISHED_PREFIX}norm.weight"
    edit_index(folder, lambda names: names.update({name: "model-00001-of-00003.safetensors"}))


def hide_tensor(folder):
    edit_index(folder, lambda names: names.pop(f"{PUBLISHED_PREFIX}norm.weight"))


def add_single_file(folder):
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model.safetensors")


def lose_index(folder):
    (folder / "model.safetensors.index.json").unlink()


def spoil_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {')


def empty_index(folder):
    edit_index(folder, dict.clear)


def list_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')


def file_by_number(folder):
    edit_index(folder, lambda names: names.update({f"{PUBLISHED_PREFIX}norm.weight": 3}))


def folder_for_index(folder):
    lose_index(folder)
    (folder / "model.safetensors.index.json").mkdir()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (list_index, "has no file names in its weight_map; download it again"),
        (file_by_number, r"puts \S+norm.weight into 3, no file; download it again"),
        (folder_for_index, "has no readable weight_map .*; download it again"),
        (remove_shard, "shard model-00002-of-00003.safetensors is missing; download it"),
        (truncate_shard, r"model-00002-of-00003.safetensors is truncated or damaged \(.*download"),
        (truncate_header, r"model-00002-of-00003.safetensors is truncated or damaged \(.*downl"),
        (
            repeat_tensor,
            r"model-00003-of-00003.safetensors repeats tensor \S+embed_tokens.weight of "
            r"model-00001-of-00003.safetensors; keep one",
        ),
        (promise_absent_tensor, "puts ghost into model-00001-of-00003.safetensors, which lacks it"),
        (misplace_tensor, r"puts \S+norm.weight into model-00001-of-00003.safetensors, which lac"),
        (hide_tensor, r"model-00003-of-00003.safetensors holds \S+norm.weight, which .*index"),
        (add_single_file, "has both model.safetensors and model.safetensors.index.json; remove"),
        (lose_index, "has neither model.safetensors nor model.safetensors.index.json; give"),
        (spoil_index, r"model.safetensors.index.json has no readable weight_map \(.*download"),
        (empty_index, "has no file names in its weight_map; download it again"),
    ],
)
def test_every_fault_of_a_sharded_folder_is_named(sharded, spoil, message):
    spoil(sharded)
    model = build(micro())
    with pytest.raises(ValueError, match=message) as error:
        hf.load_pretrained(model, sharded)
    assert str(sharded) in str(error.value)
    assert all(tensor.isnan().all() for tensor in model.state_dict().values())


# Saving safely


def test_a_folder_with_anything_in_it_is_left_alone(checkpoint):
    folder, tensors = checkpoint
    with pytest.raises(ValueError, match="model already exists and is not empty; give a new fold"):
        hf.save_pretrained(build(micro(), seed=1), folder)
    assert_same(load_folder(folder), tensors)


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    hf.save_pretrained(build(micro(), seed=0), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_save_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(slot, *rest):
        if slot.parameter == "final_norm.weight":
            raise OSError("no space left")
        return original(slot, *rest)

    original = hf._export
    monkeypatch.setattr(hf, "_export", fail)
    with pytest.raises(OSError, match="no space left"):
        hf.save_pretrained(build(micro(), seed=0), tmp_path / "runs" / "out")
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int8}, r"dtype = torch.int8: give one of \[torch.float64"),
        ({"max_shard_bytes": 0}, "max_shard_bytes = 0: give a positive number"),
        ({"prefix": ""}, "prefix = '': give"),
    ],
)
def test_impossible_options_are_refused_by_name(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        hf.save_pretrained(build(micro(), seed=0), tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []
