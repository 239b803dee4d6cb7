"""What is in force, printed once before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from pallas_ops.bridge import runtime_target
from torch_gemma4.accounting import parameter_table, training_flops
from train.sharding import sharding_table

if TYPE_CHECKING:
    from train.config import RunConfig
    from train.mesh import DeviceMesh


def implementations(target: str) -> dict[str, str]:
    """Which implementation each op of the MoE takes, by lowering target."""
    pallas = "Pallas, compiled by Mosaic" if target == "tpu" else "Pallas, interpreted as HLO"
    return {
        "gmm, tgmm": pallas,
        "routing plan": "JAX, counting",
        "permute, combine": "JAX, XLA gathers",
        "attention": "torch einsum, fp32 softmax",
    }


def print_plan(config: RunConfig, mesh: DeviceMesh, console: Console) -> None:
    """Implementations, dtypes, layout and sizes, as tables."""
    plan = Table(title=f"{config.name}: the plan in force", show_header=False, title_justify="left")
    parameters = next(p for p in parameter_table(config.model) if p.part == "total")
    flops = training_flops(
        config.model,
        sequence_length=config.data.sequence_length,
        sequences_per_chip=config.data.batch_size // mesh.num_row_shards,
    )
    axes = " x ".join(f"{name} {size}" for name, size in config.mesh.axes)
    plan.add_row("devices", f"{mesh.num_row_shards} {config.mesh.platform} ({axes})")
    plan.add_row("parameters", f"{parameters.total:,} in all, {parameters.active:,} active a token")
    plan.add_row("a step", f"{flops.training / 1e12:,.4g} TFLOP a device (forward and backward)")
    plan.add_row(
        "dtypes",
        f"parameters float32, compute {config.precision.compute}, reduce {config.precision.reduce}",
    )
    plan.add_row(
        "layers", f"{config.layers}, {'recomputed' if config.recompute else 'activations kept'}"
    )
    for op, implementation in implementations(runtime_target()).items():
        plan.add_row(op, implementation)
    console.print(plan)

    table = Table(title="parameters on the mesh", title_justify="left")
    for heading in ("parameter", "shape", "split", "bytes a device"):
        table.add_column(heading, justify="right" if heading.startswith("bytes") else "left")
    for row in sharding_table(config.model, config.mesh):
        spec = ", ".join("-" if axis is None else str(axis) for axis in row.spec)
        table.add_row(row.parameter, str(list(row.shape)), spec, f"{row.bytes_per_chip:,}")
    console.print(table)
