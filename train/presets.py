"""Runs by name, as functions. `python -m train --preset NAME`; any field can be overridden."""

from collections.abc import Callable
from dataclasses import replace

from torch_gemma4 import presets as models
from train.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    MeshConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
)


def cpu_tiny() -> RunConfig:
    """A 1.8 M parameter MoE on 4 virtual CPU devices, learning Python from the standard library's
    source. Two cores, two minutes, no download: see it work before you rent anything."""
    return RunConfig(
        name="cpu_tiny",
        model=replace(models.tiny_moe(), load_balance_loss_weight=0.02),
        steps=100,
        attention="einsum",
        precision=PrecisionConfig(compute="float32"),
        data=DataConfig(sequence_length=128, batch_size=16),
        optim=OptimConfig(learning_rate=3e-3, warmup_steps=20),
        checkpoint=CheckpointConfig(every_minutes=0.5),
        eval=EvalConfig(every=50, batches=8),
    )


def gemma4_26b_a4b() -> RunConfig:
    """Gemma 4 26B-A4B on one v6e-128 slice: every weight sharded over 128 chips, 2 sequences of
    16,384 tokens a chip, layers recomputed, the vocabulary loss in 8 tiles. Expert weights are
    whole: compiled alone for v6e-128, router and experts in two halves (model.split_expert_weights)
    wait for twice the bytes of gathers (benchmarks/expert_layouts.py)."""
    model = replace(models.gemma4_26b_a4b(), load_balance_loss_weight=0.001, num_loss_tiles=8)
    return RunConfig(
        name="gemma4_26b_a4b",
        model=model,
        steps=10_000,
        recompute="full",
        mesh=MeshConfig(platform="tpu", fsdp=128),
        data=DataConfig(sequence_length=16_384, batch_size=256),
        optim=OptimConfig(learning_rate=3e-4, warmup_steps=500),
        eval=EvalConfig(every=500, batches=2),
    )


PRESETS: dict[str, Callable[[], RunConfig]] = {
    preset.__name__: preset for preset in (cpu_tiny, gemma4_26b_a4b)
}
"""Every preset by name; the first is the default."""
