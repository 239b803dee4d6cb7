"""What to change when a step does not fit, and about how many bytes a chip each change saves.

The savings are arithmetic on the configuration, not the compiler's: they rank the remedies and tell
whether one can be enough. Compile again to know. That of more loss tiles has been held against the
compiler (tests/train/test_loss_memory.py); the others have not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_gemma4.accounting import StateBytes, state_bytes
from torch_gemma4.recompute_cost import recompute_cost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from train.compile.topology import Topology
    from train.config import RunConfig

_FLOAT32 = 4
_PERIODS_ON_THEIR_WAY = 3
"""To the host, one, and back, two: HBM has them still."""
_COMPUTE_BYTES = {"float32": _FLOAT32, "bfloat16": 2}


@dataclass(frozen=True)
class Remedy:
    """One change of the configuration."""

    options: str
    """As typed on the command line."""
    saved_bytes: int
    """A chip, estimated."""
    because: str
    """What the estimate counts."""


def best_remedies(
    config: RunConfig,
    topology: Topology | None,
    larger: Topology | None,
    used_bytes: int,
    count: int = 3,
) -> list[Remedy]:
    """The `count` remedies that save most, largest saving first.

    Args:
        config: what does not fit, on a mesh of the topology's chips.
        topology: the slice it was compiled for; needed where there is a `larger` one.
        larger: the next slice with more of the same chips, None if there is none.
        used_bytes: what the compiler says the program takes on a chip.
    """
    found = [
        *_tokens(config, used_bytes),
        *_loss_tiles(config),
        *_recompute(config),
        *_offload(config),
        *_attention(config),
        *_dtypes(config, used_bytes),
        *_more_chips(config, topology, larger),
    ]
    return sorted(found, key=lambda remedy: -remedy.saved_bytes)[:count]


def _state(config: RunConfig) -> StateBytes:
    return state_bytes(
        config.model,
        config.mesh.fsdp,
        compute_bytes=_COMPUTE_BYTES[config.precision.compute],
        num_moments=config.optim.num_moments,
    )


def _sequences(config: RunConfig) -> int:
    """Of a chip, in one micro-batch."""
    return config.data.batch_size // (config.mesh.num_devices * config.accumulate)


def _with_tokens(config: RunConfig, used_bytes: int) -> int:
    """Bytes that grow with the tokens on a chip: all but state, gradients and gathered weights."""
    state = _state(config)
    fixed = state.persistent + state.gradients + state.gathered_layer + state.gathered_embedding
    return max(0, used_bytes - fixed)


def _tokens(config: RunConfig, used_bytes: int) -> Iterator[Remedy]:
    saved = _with_tokens(config, used_bytes) // 2
    if _sequences(config) % 2 == 0:
        # The first cut adds sums of gradients beside those of the micro-batch at work.
        sums = _state(config).gradients if config.accumulate == 1 else 0
        yield Remedy(
            f"--accumulate {2 * config.accumulate}",
            max(0, saved - sums),
            "half the sequences at a time: half of all but state, gradients and gathered weights",
        )
    elif config.data.sequence_length % (2 * config.model.num_loss_tiles) == 0:
        yield Remedy(
            f"--data.sequence_length {config.data.sequence_length // 2}",
            saved,
            "half the tokens: half of all but state, gradients and gathered weights",
        )


def _loss_tiles(config: RunConfig) -> Iterator[Remedy]:
    model, length = config.model, config.data.sequence_length
    tiles = model.num_loss_tiles
    if length % (2 * tiles):
        return
    elements = _sequences(config) * length // tiles * model.vocab_size
    yield Remedy(
        f"--model.num_loss_tiles {2 * tiles}",
        elements * _COMPUTE_BYTES[config.precision.compute] // 2,
        "half of one tile's logits, of which no float32 copy is kept",
    )


def _recompute(config: RunConfig) -> Iterator[Remedy]:
    if config.recompute == "full" or config.offload_activations:
        return
    yield Remedy(
        "--recompute full",
        _kept_bytes(config, config.recompute) - _kept_bytes(config, "full"),
        "what layers keep for the backward pass, besides their inputs and scores",
    )


def _offload(config: RunConfig) -> Iterator[Remedy]:
    if config.recompute == "none" or config.layers != "scan" or config.offload_activations:
        return
    periods = config.model.num_periods
    if periods > _PERIODS_ON_THEIR_WAY:
        yield Remedy(
            "--offload_activations",
            _kept_bytes(config, config.recompute) * (periods - _PERIODS_ON_THEIR_WAY) // periods,
            f"what all but {_PERIODS_ON_THEIR_WAY} periods of layers keep, on the host instead",
        )


def _kept_bytes(config: RunConfig, policy: str) -> int:
    return recompute_cost(
        config.model,
        policy,
        sequence_length=config.data.sequence_length,
        sequences_per_chip=_sequences(config),
        compute_bytes=_COMPUTE_BYTES[config.precision.compute],
    ).kept_bytes


def _attention(config: RunConfig) -> Iterator[Remedy]:
    if config.attention == "kernel":
        return
    length = config.data.sequence_length
    alive = 1 if config.recompute != "none" else config.model.num_hidden_layers
    heads = _sequences(config) * config.model.num_attention_heads
    yield Remedy(
        "--attention kernel",
        alive * heads * length**2 * _FLOAT32,
        f"scores of {alive} layer{'s'[: alive > 1]}, S * S a head in float32",
    )


def _dtypes(config: RunConfig, used_bytes: int) -> Iterator[Remedy]:
    model, precision = config.model, config.precision
    if precision.compute == "float32":
        yield Remedy(
            "--precision.compute bfloat16",
            _with_tokens(config, used_bytes) // 2,
            "half of activations",
        )
    elif precision.reduce == "float32" and model.enable_moe_block:
        experts = 3 * model.num_experts * model.moe_intermediate_size * model.hidden_size
        yield Remedy(
            "--precision.reduce bfloat16",
            experts * _FLOAT32 // 2,
            "half of one layer's expert gradients before they are reduced",
        )


def _more_chips(
    config: RunConfig, topology: Topology | None, larger: Topology | None
) -> Iterator[Remedy]:
    if larger is None:
        return
    state = _state(config)
    share = 1 - topology.num_chips / larger.num_chips
    sequences = _sequences(config) * config.accumulate * larger.num_chips
    yield Remedy(
        f"--topology {larger.name} --data.batch_size {sequences}",
        int((state.persistent + state.gradients) * share),
        "state and gradients over more chips, the same sequences on each",
    )
