"""What is in force, printed once before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from pallas_ops.bridge import runtime_target
from torch_gemma4.accounting import parameter_table, training_flops
from train.launch import libtpu_flags
from train.sharding import sharding_table
from train.tables import format_flops, rule_view, text_table

if TYPE_CHECKING:
    from rich.console import Console

    from train.config import RunConfig
    from train.mesh import DeviceMesh


def implementations(
    target: str, attention: str, dispatch: str, reason: str | None
) -> dict[str, str]:
    """Which implementation each op of a layer takes on `target`, "cpu" or "tpu", when the config
    chooses `attention` and comes to `dispatch`, for a `reason` if not by choice."""
    pallas = "Pallas, compiled by Mosaic" if target == "tpu" else "Pallas, interpreted as HLO"
    gathers = "JAX, XLA gathers" + (f" ({reason.split(';')[0]})" if reason else "")
    return {
        "norm_rope, attention": pallas if attention == "kernel" else "torch, fp32 softmax",
        "routing_plan": "JAX, counting",
        "permute, combine": pallas if dispatch == "kernel" else gathers,
        "expert_mlp, gmm, tgmm": pallas,
        "gelu_gate": "torch, fused by XLA",
    }


def _expert_weights(config: RunConfig) -> str:
    halves = "in two halves, each gathered on its own, for split_gmm"
    fence = "; gather_fence keeps the router behind their gathers"
    lie = halves if config.model.split_expert_weights else "whole"
    return lie + (fence if config.fence_expert_gathers else "")


def print_plan(config: RunConfig, mesh: DeviceMesh, console: Console) -> None:
    """Devices, sizes, dtypes and implementations, then the layout of parameters by rule, and
    libtpu's flags if there are any, as tables of at most 80 columns."""
    parameters = next(p for p in parameter_table(config.model) if p.part == "total")
    flops = training_flops(
        config.model,
        sequence_length=config.data.sequence_length,
        sequences_per_chip=config.data.batch_size // mesh.num_row_shards,
    )
    axes = " x ".join(f"{name} {size}" for name, size in config.mesh.axes)
    precision = config.precision
    on_host = ", what is kept lies on the host" if config.offload_activations else ""
    plan = Table.grid(padding=(0, 2))
    facts = {
        "devices": f"{mesh.num_row_shards} {config.mesh.platform} ({axes})",
        "parameters": f"{parameters.total:,} in all, {parameters.active:,} active a token",
        "a step": f"{format_flops(flops.training)} a device (forward and backward)",
        "dtypes": f"parameters float32, compute {precision.compute}, reduce {precision.reduce}",
        "layers": f"{config.layers}, recompute {config.recompute}{on_host}",
        "expert weights": _expert_weights(config),
        **implementations(runtime_target(), config.attention, *config.dispatch_in_force),
    }
    for fact in facts.items():
        plan.add_row(*fact)
    console.print(f"[bold]{config.name}: the plan in force[/bold]\n", highlight=False)
    console.print(plan)
    console.print()
    console.print(rule_view(sharding_table(config.model, config.mesh)))
    if flags := libtpu_flags():
        rows = [(f"{name}={value}", reason) for name, value, reason in flags]
        console.print(text_table("libtpu flags in force", ("flag", "why"), rows))
