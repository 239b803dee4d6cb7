"""Hugging Face checkpoints: the name map is a bijection, bytes survive the round trip, and memory
stays bounded by one tensor. Faults: test_hf_faults.py."""

import json
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from pallas_ops import split_experts
from tests.torch_gemma4.checkpoints import assert_same, build, load_folder
from torch_gemma4 import hf
from torch_gemma4.config import Gemma4Config
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
    "split experts": replace(micro(), split_expert_weights=True),
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
        assert slot.ours(theirs).shape == slot.part_shape
        if slot.split:
            assert split_experts(slot.ours(theirs)).flatten(1, 2).shape == ours.shape, name
        else:
            assert ours.shape == slot.part_shape, name
        offsets, sizes = slot.box
        box = torch.empty(shapes[slot.parameter], device="meta")[
            tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        ]
        assert box.shape == sizes, name
        assert box.storage_offset() == ours.storage_offset(), name
        assert box.numel() == ours.numel(), name
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


def test_files_do_not_depend_on_the_split_of_experts(tmp_path):
    whole, split = (build(VARIANTS[name], seed=0) for name in ("micro", "split experts"))
    for name, tensor in split.state_dict().items():
        tensor.copy_(whole.state_dict()[name.removesuffix("_halves")].reshape(tensor.shape))
    for name, model in (("whole", whole), ("split", split)):
        hf.save_pretrained(model, tmp_path / name)
    assert_same(load_folder(tmp_path / "split"), load_folder(tmp_path / "whole"))
    again = build(VARIANTS["split experts"])
    hf.load_pretrained(again, tmp_path / "whole")
    assert_same(again.state_dict(), split.state_dict())


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


def test_rows_are_read_alone(sharded):
    reader = FolderReader(sharded)
    for name in reader.names:
        whole = reader.tensor(name)
        assert torch.equal(reader.rows(name, 0, len(whole)), whole)
        assert torch.equal(reader.rows(name, len(whole) // 2, len(whole)), whole[len(whole) // 2 :])


def test_shards_fill_in_order_and_a_large_tensor_stands_alone():
    sizes = {"a": 4, "b": 4, "large": 11, "c": 2, "d": 8, "e": 1}
    entries = [TensorEntry(name, (size,), torch.bfloat16) for name, size in sizes.items()]
    shards = [[entry.name for entry in shard] for shard in split_shards(entries, 20)]
    assert shards == [["large"], ["a", "b", "c"], ["d", "e"]]
