"""Hugging Face checkpoints: the name map is a bijection, bytes survive the round trip, memory stays
bounded by one tensor, and every fault of a folder is named."""

import json
import shutil
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from torch_gemma4 import hf
from torch_gemma4.config import Gemma4Config
from torch_gemma4.execution import Execution, Precision
from torch_gemma4.hf_names import (
    PUBLISHED_PREFIX,
    SKIPPED_PREFIXES,
    TEXT_ONLY_PREFIX,
    hf_to_ours,
)
from torch_gemma4.layer_spec import LayerOverride
from torch_gemma4.model import Gemma4ForCausalLM
from torch_gemma4.presets import gemma4_26b_a4b, micro
from torch_gemma4.safetensors_folder import FolderReader, TensorEntry, split_shards

VARIANTS = {
    "micro": micro(),
    "untied": replace(micro(), tie_word_embeddings=False),
    "biases": replace(micro(), attention_bias=True),
    "own values": replace(micro(), attention_k_eq_v=False),
    "dense": replace(micro(), enable_moe_block=False),
    "uneven": replace(micro(), per_layer=(LayerOverride(layer=1, head_dim=12),)),
    "frozen scalar": replace(micro(), layer_scalar_trainable=False),
}


def oracle(hf_cases, name):
    """A file or folder handed out with the cases; skips where another collection lacks it."""
    path = hf_cases / name
    if not path.exists():
        pytest.skip(f"no {path}")
    return path


def build(config, *, dtype=torch.float32, seed=None):
    """A model of NaN, or of values that differ everywhere if `seed` is given."""
    model = Gemma4ForCausalLM(config, Execution(precision=Precision(params=dtype)))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def assert_same(found, expected):
    """Equal names, dtypes, shapes and bits."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*bits), name


def load_folder(folder):
    """All tensors of a folder, by the safetensors library."""
    parts = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for part in parts for name, tensor in part.items()}


@pytest.fixture
def checkpoint(tmp_path):
    """(folder, tensors) of a saved micro model in one file, to be spoilt."""
    hf.save_pretrained(build(micro(), seed=0), tmp_path / "model")
    return tmp_path / "model", load_folder(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    """A saved micro model in three shards."""
    folder = tmp_path / "sharded"
    hf.save_pretrained(build(micro(), seed=0), folder, max_shard_bytes=200_000)
    assert len(list(folder.glob("model-*-of-00003.safetensors"))) == 3
    return folder


# The name map


def test_the_26b_reads_the_657_text_tensors_and_no_other(hf_cases):
    shapes = json.loads(oracle(hf_cases, "gemma4_26b_keys.json").read_text())["tensors"]
    slots = hf_to_ours(gemma4_26b_a4b())
    text = [name for name in shapes if not name.startswith(SKIPPED_PREFIXES)]
    assert (len(text), len(shapes) - len(text)) == (657, 356)
    assert list(slots) == text  # in Hugging Face's order, too
    assert {name: list(slot.shape) for name, slot in slots.items()} == {n: shapes[n] for n in text}


@pytest.mark.parametrize("config", [*VARIANTS.values(), gemma4_26b_a4b()], ids=[*VARIANTS, "26b"])
def test_slots_cover_every_parameter_exactly_once(config):
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in Gemma4ForCausalLM(config).state_dict().items()}
    slots = hf_to_ours(config)
    assert {slot.parameter for slot in slots.values()} == set(shapes)
    # Dims beyond [P, C, rows] are never split, and the 26B's would not fit.
    counts = {
        name: torch.zeros(shape[: 3 if name.startswith("stack.") else 1])
        for name, shape in shapes.items()
    }
    for name, slot in slots.items():
        counts[slot.parameter][slot.index] += 1
        ours = torch.empty(shapes[slot.parameter], device="meta")[slot.index]
        theirs = torch.empty(slot.shape, device="meta")
        assert (theirs.mT if slot.transposed else theirs).shape == ours.shape, name
    assert all(bool((count == 1).all()) for count in counts.values())


def test_the_map_refuses_its_own_output(checkpoint):
    folder, tensors = checkpoint
    once_more = hf_to_ours(micro())
    assert not set(once_more) & {slot.parameter for slot in once_more.values()}
    model = build(micro(), seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for renamed in (
        {PUBLISHED_PREFIX + name: tensor for name, tensor in tensors.items()},
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
    ):
        save_file(renamed, folder / "model.safetensors")
        with pytest.raises(ValueError, match=r"missing 13\d text tensors: .*; nothing reads \d+"):
            hf.load_pretrained(model, folder)
    assert_same(model.state_dict(), before)


def test_an_unknown_prefix_is_refused():
    with pytest.raises(ValueError, match=r"prefix = 'text\.': give 'model\.language_model\.'"):
        hf_to_ours(micro(), prefix="text.")


# Round trips


def test_every_oracle_case_survives_bit_for_bit(hf_case):
    config = Gemma4Config.from_hf_file(hf_case)
    model = build(config)
    hf.load_pretrained(model, hf_case)
    source = {
        name: tensor
        for path in hf_case.glob("model*.safetensors")
        for name, tensor in load_file(path).items()
    }
    published = any(name.startswith(PUBLISHED_PREFIX) for name in source)
    prefix = PUBLISHED_PREFIX if published else TEXT_ONLY_PREFIX
    parameters = model.state_dict()
    assert not any(tensor.isnan().any() for tensor in parameters.values())
    assert_same(dict(hf.export_tensors(config, parameters.get, prefix=prefix)), source)
    assert_same(dict(hf.iter_hf_tensors(hf_case)), source)


def test_published_sharded_comes_back_byte_for_byte(hf_cases, tmp_path):
    source = oracle(hf_cases, "published_sharded")
    model = build(Gemma4Config.from_hf_file(source))
    hf.load_pretrained(model, source)
    hf.save_pretrained(model, tmp_path / "out", max_shard_bytes=250_000)
    files = sorted(path.name for path in source.glob("model*"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", *files]
    for file in files:
        assert (tmp_path / "out" / file).read_bytes() == (source / file).read_bytes(), file
    assert Gemma4Config.from_hf_file(tmp_path / "out") == model.config


def test_a_single_text_only_file_comes_back_byte_for_byte(hf_cases, tmp_path):
    source = oracle(hf_cases, "tiny_base")
    model = build(Gemma4Config.from_hf_file(source))
    hf.load_pretrained(model, source)
    hf.save_pretrained(model, tmp_path / "out", prefix=TEXT_ONLY_PREFIX)
    written, original = (f / "model.safetensors" for f in (tmp_path / "out", source))
    assert written.read_bytes() == original.read_bytes()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("gemma4_text", "float32")
    assert Gemma4Config.from_hf(config) == model.config


def test_both_prefixes_hold_the_same_model(hf_cases):
    states = []
    for case in ("tiny_base", "published_sharded"):
        folder = oracle(hf_cases, case)
        model = build(Gemma4Config.from_hf_file(folder))
        hf.load_pretrained(model, folder)
        states.append(model.state_dict())
    assert_same(*states)


@pytest.mark.parametrize("prefix", [PUBLISHED_PREFIX, TEXT_ONLY_PREFIX])
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_every_kind_of_model_survives(config, prefix, tmp_path):
    model, other = build(config, seed=0), build(config)
    hf.save_pretrained(model, tmp_path / "out", prefix=prefix, max_shard_bytes=100_000)
    hf.load_pretrained(other, tmp_path / "out")
    assert_same(other.state_dict(), model.state_dict())
    assert set(load_folder(tmp_path / "out")) == set(hf_to_ours(config, prefix=prefix))
    assert Gemma4Config.from_hf_file(tmp_path / "out").layers == config.layers


def test_orientation_of_fused_and_transposed_tensors(checkpoint):
    """Layer 4 is layer 1 of segment 0 in period 1, layer 5 the global one of period 1."""
    _, theirs = checkpoint
    ours, layers = build(micro(), seed=0).state_dict(), f"{PUBLISHED_PREFIX}layers."
    down = ours["stack.segments.0.experts.down"][1, 1]
    assert torch.equal(theirs[f"{layers}4.experts.down_proj"], down.mT)
    gate_up = ours["stack.segments.1.experts.gate_up"][1, 0]
    assert torch.equal(theirs[f"{layers}5.experts.gate_up_proj"], gate_up)
    gate, up = ours["stack.segments.1.mlp.gate_up_proj.weight"][1, 0].chunk(2)
    assert torch.equal(theirs[f"{layers}5.mlp.gate_proj.weight"], gate)
    assert torch.equal(theirs[f"{layers}5.mlp.up_proj.weight"], up)
    for theirs_name, ours_name in {
        "pre_feedforward_layernorm": "pre_mlp_norm",
        "pre_feedforward_layernorm_2": "pre_experts_norm",
        "post_feedforward_layernorm_1": "post_mlp_norm",
        "post_feedforward_layernorm_2": "post_experts_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }.items():
        norm = ours[f"stack.segments.0.{ours_name}.weight"][0, 1]
        assert torch.equal(theirs[f"{layers}1.{theirs_name}.weight"], norm)


def test_dtypes_are_converted_both_ways(tmp_path):
    model = build(micro(), seed=0)
    hf.save_pretrained(model, tmp_path / "bf16", dtype=torch.bfloat16)
    tensors = load_folder(tmp_path / "bf16")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "bf16/config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        other = build(micro(), dtype=dtype)
        hf.load_pretrained(other, tmp_path / "bf16")
        rounded = {n: t.bfloat16().to(dtype) for n, t in model.state_dict().items()}
        assert_same(other.state_dict(), rounded)


def test_vision_and_audio_are_skipped_and_never_read(checkpoint, monkeypatch):
    folder, tensors = checkpoint
    extra = {prefix + "x": torch.ones(3, dtype=torch.int8) for prefix in SKIPPED_PREFIXES}
    save_file(tensors | extra, folder / "model.safetensors")
    read = []
    original = FolderReader.tensor
    monkeypatch.setattr(FolderReader, "tensor", lambda s, n: read.append(n) or original(s, n))
    model = build(micro())
    hf.load_pretrained(model, folder)
    assert Counter(read) == Counter(hf_to_ours(micro()).keys())
    assert_same(model.state_dict(), build(micro(), seed=0).state_dict())
    assert_same(dict(hf.iter_hf_tensors(folder)), tensors)


def test_a_tied_head_is_not_saved_and_an_untied_one_is(tmp_path):
    for name in ("micro", "untied"):
        hf.save_pretrained(build(VARIANTS[name], seed=0), tmp_path / name)
    assert "lm_head.weight" not in load_folder(tmp_path / "micro")
    assert "lm_head.weight" in load_folder(tmp_path / "untied")


# Streaming


class Alive:
    """Counts tensors a function has made that are still alive, and the most there ever were."""

    def __init__(self, make):
        self.make, self.now, self.most, self.made = make, 0, 0, 0

    def __call__(self, *args):
        tensor = self.make(*args)
        self.now, self.made = self.now + 1, self.made + 1
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self.gone)
        return tensor

    def gone(self):
        self.now -= 1


def test_at_most_one_tensor_is_alive_at_a_time(sharded, tmp_path, monkeypatch):
    reading, writing = Alive(FolderReader.tensor), Alive(hf._export)
    monkeypatch.setattr(FolderReader, "tensor", lambda *args: reading(*args))
    monkeypatch.setattr(hf, "_export", writing)
    model = build(micro())
    hf.load_pretrained(model, sharded)
    hf.save_pretrained(model, tmp_path / "again", max_shard_bytes=200_000)
    number = len(hf_to_ours(micro()))
    assert (reading.made, reading.most, reading.now) == (number, 1, 0)
    assert (writing.made, writing.most, writing.now) == (number, 1, 0)


def test_iterated_tensors_are_aligned_where_the_file_is_not(checkpoint):
    folder, _ = checkpoint
    reader = FolderReader(folder)
    mapped = [reader.tensor(name).data_ptr() % 64 for name in reader.names]
    assert any(mapped), "the folder no longer shows the problem"
    assert not any(tensor.data_ptr() % 64 for _, tensor in hf.iter_hf_tensors(folder))


def test_shards_fill_in_order_and_a_large_tensor_stands_alone():
    sizes = {"a": 4, "b": 4, "large": 11, "c": 2, "d": 8, "e": 1}
    entries = [TensorEntry(name, (size,), torch.bfloat16) for name, size in sizes.items()]
    shards = [[entry.name for entry in shard] for shard in split_shards(entries, 20)]
    assert shards == [["large"], ["a", "b", "c"], ["d", "e"]]


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


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
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
        (empty_index, "has an empty weight_map; download it again"),
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
