"""Every refusal of a run's configuration names field, value and remedy."""

import json
from dataclasses import replace

import pytest

from train.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    MeshConfig,
    OptimConfig,
    RunConfig,
    SampleConfig,
)
from train.data.config import HuggingFaceConfig
from train.presets import PRESETS, cpu_tiny


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MeshConfig(fsdp=0), r"mesh\.fsdp = 0: give at least 1"),
        (lambda: MeshConfig(data=-1), r"mesh\.data = -1: give at least 1"),
        (lambda: MeshConfig(fsdp=64, data=2), r"mesh\.data = 128: .*counts them in 8 bits"),
        (lambda: DataConfig(sequence_length=1), r"data\.sequence_length = 1: give at least 2"),
        (lambda: DataConfig(batch_size=0), r"data\.batch_size = 0: give at least 1"),
        (lambda: DataConfig(prefetch=0), r"data\.prefetch = 0: give at least 1"),
        (lambda: DataConfig(max_bytes=0), r"data\.max_bytes = 0: give at least 1"),
        (lambda: DataConfig(eval_fraction=1.0), r"data\.eval_fraction = 1\.0: give a share"),
        (lambda: DataConfig(seed=-1), r"data\.seed = -1: give a whole number"),
        (lambda: DataConfig(pattern=()), r"data\.pattern = \(\): give one, such as '\*\.txt'"),
        (lambda: OptimConfig(learning_rate=0), r"optim\.learning_rate = 0: give a positive"),
        (lambda: OptimConfig(eps=0), r"optim\.eps = 0: give a positive"),
        (lambda: OptimConfig(clip_norm=-1), r"optim\.clip_norm = -1: give a positive"),
        (lambda: OptimConfig(warmup_steps=-1), r"optim\.warmup_steps = -1: give at least 0"),
        (lambda: OptimConfig(weight_decay=-0.1), r"optim\.weight_decay = -0\.1: give at least 0"),
        (lambda: OptimConfig(min_lr_ratio=1.5), r"optim\.min_lr_ratio = 1\.5: give a share"),
        (lambda: OptimConfig(decay_share=-0.1), r"optim\.decay_share = -0\.1: give a share"),
        (lambda: OptimConfig(betas=(0.9, 1.0)), r"optim\.betas = \(0\.9, 1\.0\): give two decays"),
        (lambda: _tiny(accumulate=0), r"accumulate = 0: give at least 1"),
        (
            lambda: _tiny(accumulate=8),
            r"data\.batch_size = 16: give a multiple of .* \* accumulate = 32: every device",
        ),
        (
            lambda: _tiny(
                optim=OptimConfig(name="muon"),
                model=replace(cpu_tiny().model, split_expert_weights=True),
            ),
            r"optim\.name = 'muon': it needs .*--model\.no_split_expert_weights, or adamw",
        ),
        (lambda: OptimConfig(momentum=1.0), r"optim\.momentum = 1\.0: give a decay in \[0, 1\)"),
        (
            lambda: _tiny(recompute="save_attention"),
            r"recompute = 'save_attention': only the attention kernel .*or --recompute full",
        ),
        (
            lambda: _tiny(offload_activations=True),
            r"offload_activations = True: all activations .*: give --recompute full",
        ),
        (
            lambda: _tiny(offload_activations=True, recompute="full", layers="loop"),
            r"offload_activations = True: only a device loop .*: give --layers scan",
        ),
        (
            lambda: _tiny(offload_activations=True, recompute="full"),
            r"offload_activations = True: a CPU has one memory: give --mesh\.platform tpu",
        ),
        (lambda: LogConfig(heat_map_every=-1), r"log\.heat_map_every = -1: give at least 0"),
        (lambda: SampleConfig(every=-1), r"sample\.every = -1: give at least 0"),
        (
            lambda: _tiny(
                data=DataConfig(
                    source="huggingface", huggingface=HuggingFaceConfig(name="x", lanes=32)
                )
            ),
            r"data\.huggingface\.eval_split = '': nothing to evaluate on: .*--eval\.every 0",
        ),
        (lambda: OptimConfig(skip_outliers=-1), r"optim\.skip_outliers = -1: give at least 0"),
        (lambda: OptimConfig(outlier_window=1), r"optim\.outlier_window = 1: give at least 2"),
        (lambda: OptimConfig(abort_after=0), r"optim\.abort_after = 0: give at least 1"),
        (lambda: CheckpointConfig(every_minutes=-1), r"checkpoint\.every_minutes = -1: give at"),
        (
            lambda: CheckpointConfig(every_steps=-1),
            r"checkpoint\.every_steps = -1: give at least 0",
        ),
        (lambda: CheckpointConfig(keep=0), r"checkpoint\.keep = 0: give at least 1"),
        (lambda: _tiny(hang_minutes=-1), r"hang_minutes = -1: give at least 0"),
        (
            lambda: _tiny(
                resume="required", checkpoint=CheckpointConfig(every_steps=0, every_minutes=0)
            ),
            r"resume = 'required': nothing is saved .*--resume auto",
        ),
        (lambda: EvalConfig(every=-1), r"eval\.every = -1: give at least 0"),
        (lambda: EvalConfig(batches=0), r"eval\.batches = 0: give at least 1"),
        (lambda: SampleConfig(prompt=""), r"sample\.prompt = '': give at least a character"),
        (
            lambda: SampleConfig(prompt="\udcff"),
            r"sample\.prompt = '\\udcff': give text that UTF-8",
        ),
        (lambda: SampleConfig(prompt="a\0"), r"sample\.prompt = 'a\\x00': .*without byte 0"),
        (lambda: SampleConfig(length=-1), r"sample\.length = -1: give at least 0"),
        (lambda: SampleConfig(temperature=-1), r"sample\.temperature = -1: give at least 0"),
        (lambda: LogConfig(every=0), r"log\.every = 0: give at least 1"),
        (lambda: _tiny(steps=0), r"steps = 0: give at least 1"),
        (lambda: _tiny(name="a/b"), r"name = 'a/b': .*--log\.dir"),
        (lambda: _tiny(name=".."), r"name = '\.\.': it names a folder"),
        (
            lambda: _tiny(data=DataConfig(eval_fraction=0)),
            r"data\.eval_fraction = 0: no text is held out .*--eval\.every 0",
        ),
        (
            lambda: _tiny(data=DataConfig(batch_size=6)),
            r"data\.batch_size = 6: give a multiple of mesh\.data \* mesh\.fsdp \* accumulate = 4",
        ),
        (
            lambda: _tiny(model=replace(cpu_tiny().model, num_loss_tiles=3)),
            r"data\.sequence_length = 128: give a multiple of model\.num_loss_tiles = 3",
        ),
        (
            lambda: _tiny(model=replace(cpu_tiny().model, vocab_size=255)),
            r"model\.vocab_size = 255: the byte tokenizer has 256 ids",
        ),
        (
            lambda: _tiny(dispatch="kernel"),
            r"dispatch = 'kernel': rows are torch\.float32; convert .*--dispatch auto",
        ),
        (
            lambda: _tiny(
                dispatch="kernel", model=replace(cpu_tiny().model, enable_moe_block=False)
            ),
            "dispatch = 'kernel': the model has no experts; give one that has",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def _tiny(**changes) -> RunConfig:
    return replace(cpu_tiny(), **changes)


def test_a_small_vocabulary_is_enough_for_what_is_not_bytes():
    model = replace(cpu_tiny().model, vocab_size=64)
    data = replace(cpu_tiny().data, source="synthetic", eval_fraction=0)
    assert replace(cpu_tiny(), model=model, data=data).model.vocab_size == 64


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_named_as_its_function_and_is_json(name):
    config = PRESETS[name]()
    assert config.name == name
    read = json.loads(config.to_json())
    assert read["model"]["hidden_size"] == config.model.hidden_size
    assert read["optim"]["betas"] == list(config.optim.betas)


def test_dispatch_takes_the_kernels_where_it_can():
    reference = PRESETS["gemma4_26b_a4b"]()
    assert reference.dispatch_in_force == ("kernel", None)
    assert replace(reference, dispatch="gather").dispatch_in_force == ("gather", None)
    name, reason = cpu_tiny().dispatch_in_force
    assert name == "gather" and "float32" in reason


def test_reference_workload():
    config = PRESETS["gemma4_26b_a4b"]()
    assert config.mesh.axes == (("data", 1), ("fsdp", 128))
    assert config.data.batch_size == 2 * config.mesh.num_devices
    assert config.data.sequence_length == 16_384
