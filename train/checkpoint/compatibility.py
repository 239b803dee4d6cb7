"""Which settings may differ between a checkpoint and the run that goes on from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from train.checkpoint.layout import LAYOUTS
from train.checkpoint.manifest import Manifest

if TYPE_CHECKING:
    from train.config import RunConfig

_SPLIT = "model.split_expert_weights"
"""Not another model, but another layout of the same: a checkpoint is converted, which is told."""
_TRAINING_ONLY = frozenset(
    f"model.{name}"
    for name in (
        "load_balance_loss_weight",
        "router_z_loss_weight",
        "z_loss_weight",
        "num_loss_tiles",
    )
)
"""Fields of the model's configuration that are about its training."""
_ABOUT_THE_RUN = (
    "name",
    "resume",
    "init_from",
    "hang_minutes",
    "log.",
    "checkpoint.",
    "eval.",
    "sample.",
    "mesh.",
    _SPLIT,
)
"""Settings that change no number of the training: not worth a line."""


def refuse_other_layout(folder: str, manifest: Manifest) -> None:
    """Raises ValueError if the checkpoint in `folder` is of a weight layout that nothing here
    reads."""
    if manifest.layout not in LAYOUTS:
        raise ValueError(
            f"{folder} has weight layout {manifest.layout!r}, and this program reads "
            f"{' and '.join(map(repr, LAYOUTS))}. Go on with the program that wrote it "
            f"({_writer(manifest)}), or give another --name"
        )


def refuse_other_model(folder: str, manifest: Manifest, config: RunConfig) -> None:
    """Raises ValueError if the checkpoint in `folder` is of another model, or of a weight layout
    that nothing here reads."""
    refuse_other_layout(folder, manifest)
    changes = [
        text
        for name, text in _differences(manifest.config, config.to_dict())
        if name.startswith("model.") and name not in (*_TRAINING_ONLY, _SPLIT)
    ]
    if changes:
        raise ValueError(
            f"{folder} holds another model: {', '.join(changes)}. Give this run another --name, or "
            "the model its checkpoint has"
        )


def changed_fields(stored: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Settings of the training that differ, each as 'field old -> new'."""
    return [
        text for name, text in _differences(stored, current) if not name.startswith(_ABOUT_THE_RUN)
    ]


def _differences(stored: dict[str, Any], current: dict[str, Any]) -> list[tuple[str, str]]:
    old, new = dict(_leaves(stored)), dict(_leaves(current))
    return [
        (name, f"{name} {old.get(name, 'unset')} -> {new.get(name, 'unset')}")
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if isinstance(value, dict):
            leaves += _leaves(value, f"{prefix}{name}.")
        else:
            leaves.append((f"{prefix}{name}", value))
    return leaves


def _writer(manifest: Manifest) -> str:
    return f"torch-gemma4 {manifest.versions.get('torch-gemma4', 'of an unknown version')}"
