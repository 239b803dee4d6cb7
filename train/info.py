"""What a run needs, by arithmetic: parameters, FLOPs, bytes and the sharding of every parameter.

No device and no torch_xla: any configuration can be looked at on any machine.
"""

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console

from torch_gemma4.accounting import parameter_table, state_bytes, training_flops
from torch_gemma4.recompute_cost import recompute_cost
from train.config import RunConfig
from train.tables import format_bytes, sharding_view, text_table

_FLOP_KINDS = ("forward", "training", "recomputed")
_COMPUTE_BYTES = {"float32": 4, "bfloat16": 2}


def collect_info(config: RunConfig) -> dict[str, Any]:
    """Everything `info` shows, as JSON values. Counts are exact; bytes and FLOPs are of one chip,
    FLOPs of one optimizer step (see `torch_gemma4.accounting` for what they count)."""
    from train.sharding import sharding_table

    compute_bytes = _COMPUTE_BYTES[config.precision.compute]
    step = {
        "sequence_length": config.data.sequence_length,
        "sequences_per_chip": config.data.batch_size // config.mesh.num_devices,
    }
    flops = training_flops(config.model, **step)
    recompute = recompute_cost(
        config.model,
        config.recompute,
        micro_batches=config.accumulate,
        compute_bytes=compute_bytes,
        **step,
    )
    # State is sharded over fsdp and repeated over data.
    state = state_bytes(
        config.model,
        config.mesh.fsdp,
        compute_bytes=compute_bytes,
        num_moments=config.optim.num_moments,
    )
    return {
        "name": config.name,
        "mesh": dict(config.mesh.axes),
        "tokens_per_step": config.data.batch_size * config.data.sequence_length,
        "parameters": {
            row.part: {"total": row.total, "active": row.active}
            for row in parameter_table(config.model)
        },
        "flops_per_chip": {
            **{
                part.part: {
                    "forward": part.forward,
                    "training": part.training,
                    "recomputed": recompute.flops.get(part.part, 0),
                }
                for part in flops.parts
            },
            "total": {
                "forward": flops.forward,
                "training": flops.training,
                "recomputed": recompute.total_flops,
            },
        },
        "recompute": {
            "policy": config.recompute,
            "flops_per_chip": recompute.total_flops,
            "kept_bytes_per_chip": recompute.kept_bytes,
        },
        "bytes_per_chip": {**asdict(state), "persistent": state.persistent},
        "sharding": [asdict(row) for row in sharding_table(config.model, config.mesh)],
    }


def print_info(config: RunConfig, *, as_json: bool = False, console: Console | None = None) -> None:
    """Prints `collect_info` as tables, or as JSON alone."""
    from train.sharding import sharding_table

    info = collect_info(config)
    if as_json:
        print(json.dumps(info, indent=2))
        return
    console = console or Console()
    axes = " x ".join(f"{name} {size}" for name, size in info["mesh"].items())
    console.print(
        f"{info['name']}: mesh {axes}, {info['tokens_per_step']:,} tokens a step", highlight=False
    )
    tables = (
        text_table(
            "Parameters",
            ("", "total", "active a token"),
            [
                (part, f"{row['total']:,}", f"{row['active']:,}")
                for part, row in info["parameters"].items()
            ],
        ),
        text_table(
            "TFLOP of a step on one chip",
            ("", "forward", "forward + backward", "run again"),
            [
                (part, *(f"{row[kind] / 1e12:,.3f}" for kind in _FLOP_KINDS))
                for part, row in info["flops_per_chip"].items()
            ],
        ),
        text_table(
            "State of one chip",
            ("", "bytes"),
            [
                *(
                    (name.replace("_", " "), format_bytes(size))
                    for name, size in info["bytes_per_chip"].items()
                ),
                (
                    f"kept by layers, recompute {config.recompute}",
                    format_bytes(info["recompute"]["kept_bytes_per_chip"]),
                ),
            ],
        ),
        sharding_view(sharding_table(config.model, config.mesh)),
    )
    for table in tables:
        console.print(table)
