"""The two weight layouts a checkpoint may hold, and the way from one to the other.

They differ in expert weights and their moments: whole [..., E, A, B], or two halves of experts
[..., 2, E * A/2, B] with "_halves" behind the name (`Gemma4Config.split_expert_weights`). Both are
the same values in the same order, so a conversion is a reshape: no bit changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_gemma4.config import Gemma4Config

WHOLE = "stacked-1"
"""Names and shapes of the tensors: `stack.segments.J...` stacked [periods, layers, ...]. A change
that makes old tensors unreadable takes the next number."""
SPLIT = "stacked-1-split-experts"
"""The same, with expert weights in two halves."""
LAYOUTS = (WHOLE, SPLIT)
"""All that this program reads."""

_EXPERT_WEIGHTS = ("experts.gate_up", "experts.down")
_HALVES = "_halves"


def layout_of(model: Gemma4Config) -> str:
    """The layout that a run of `model` writes."""
    return SPLIT if model.split_expert_weights else WHOLE


def stored_form(
    name: str, shape: tuple[int, ...], num_experts: int, layout: str
) -> tuple[str, tuple[int, ...]]:
    """Name and shape in `layout` of the tensor that has `name` and `shape` in either one."""
    base = name.removesuffix(_HALVES)
    if not base.endswith(_EXPERT_WEIGHTS):
        return name, shape
    *stack, first, second, width = shape
    is_split = layout == SPLIT
    leading = 2 if is_split else num_experts
    return base + _HALVES * is_split, (*stack, leading, first * second // leading, width)
