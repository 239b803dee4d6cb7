"""How evenly tokens are spread over the experts, as numbers and as a picture."""

from __future__ import annotations

import numpy as np


def load_over_ideal(expert_load: np.ndarray) -> np.ndarray:
    """`expert_load` [L, E], the tokens each expert received, over its layer's mean: 1 is perfect
    balance."""
    return expert_load / expert_load.mean(axis=1, keepdims=True).clip(min=1e-9)


def expert_load_metrics(expert_load: np.ndarray) -> dict[str, float]:
    """Of `expert_load` [L, E]: the largest and smallest load over ideal, and how many experts
    received nothing."""
    ratio = load_over_ideal(expert_load)
    return {
        "expert_load_max": float(ratio.max()),
        "expert_load_min": float(ratio.min()),
        "dead_experts": int((expert_load == 0).sum()),
    }


def heat_map(expert_load: np.ndarray, step: int) -> np.ndarray:
    """uint8 pixels [height, width, 3]: layers down, experts across, load over ideal as colour from
    0 to 2 (what is more looks like 2); experts that received nothing are black."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_layers, num_experts = expert_load.shape
    size = (min(3.5 + 0.08 * num_experts, 16), min(1.8 + 0.15 * num_layers, 12))
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    dead = np.ma.masked_where(expert_load == 0, load_over_ideal(expert_load))
    axes.set_facecolor("black")
    image = axes.imshow(
        dead, cmap="coolwarm", vmin=0, vmax=2, aspect="auto", interpolation="nearest"
    )
    axes.set(xlabel="expert", ylabel="layer", title=f"load over ideal, step {step}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, extend="max")
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
