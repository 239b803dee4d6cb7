"""`python -m train compile` and `python -m train report`: trace, compile, tell."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from pallas_ops.chips import V6E
from train.compile.topology import Topology, find_topology, next_larger
from train.compile.views import markdown_document, read_report, report_views
from train.launch import libtpu_flags, prepare_compiler, prepare_tracing
from train.tables import format_bytes

if TYPE_CHECKING:
    from train.compile.compiler import Program
    from train.compile.report import Workload
    from train.compile.trace import TracedStep
    from train.config import RunConfig

_PACKAGES = ("torch", "torch_xla", "jax", "libtpu")


def compile_and_report(config: RunConfig, topology_name: str, out: str) -> Path:
    """Compiles one step of `config` for a slice and writes the report; returns its folder.

    The mesh's fsdp axis is set to fill the slice. Raises ValueError for an unknown topology or one
    that the mesh's data axis or the batch does not divide, and SystemExit where the step does not
    fit (after a report of what did not).
    """
    topology = find_topology(topology_name)
    config = on_topology(config, topology)
    prepare_compiler(topology.chip.name)
    prepare_tracing()
    from train.compile.compiler import DoesNotFit, compile_step
    from train.compile.trace import trace_step

    console = Console()
    console.print(f"{config.name} for {topology.name}: tracing, then compiling (minutes)")
    folder = Path(out) / f"{config.name}-{topology.name}"
    folder.mkdir(parents=True, exist_ok=True)
    step = trace_step(config)
    try:
        program = compile_step(step, topology)
    except DoesNotFit as error:
        words = folder / "does_not_fit.txt"
        words.write_text(str(error))
        report = refusal(config, topology, str(error), step.argument_names)
        if report is None:
            first = str(error).splitlines()[0]
            raise SystemExit(
                f"does not fit {topology.name}: {first} (all of it: {words})"
            ) from None
        _write(report | _provenance(config), folder, console)
        excess = format_bytes(report["memory"]["exceeded"])
        raise SystemExit(
            f"does not fit {topology.name}, by {excess} a chip; the compiler's own words: {words}"
        ) from None
    (folder / "program.hlo").write_text(program.hlo)
    console.print("reading it, and compiling its kernels alone for their schedules")
    report = _accept(config, topology, step, program)
    _write(report | _provenance(config), folder, console)
    return folder


def show_report(path: str, other: str | None = None, console: Console | None = None) -> None:
    """Prints a report.json again, or with `other` the two side by side. Raises ValueError for files
    that are no report."""
    from train.compile.compare import compare_views

    console = console or Console()
    report = read_report(path)
    if other is None:
        views = report_views(report)
    else:
        views = compare_views(report, read_report(other), _distinct(path, other))
    for view in views:
        console.print(view.rich())


def on_topology(config: RunConfig, topology: Topology) -> RunConfig:
    """`config` with a mesh of the topology's chips, its data axis across the slices where there are
    several: a data axis of 1 becomes their number. Raises ValueError for one that neither the
    slices nor the chips allow."""
    data = config.mesh.data
    if topology.num_slices > 1 and data == 1:
        data = topology.num_slices
    if data % topology.num_slices:
        raise ValueError(
            f"mesh.data = {data}: no multiple of the {topology.num_slices} slices of "
            f"{topology.name}; weights are gathered within a slice, so give --mesh.data "
            f"{topology.num_slices} or a multiple of it"
        )
    if topology.num_chips % data:
        raise ValueError(
            f"mesh.data = {data}: does not divide the {topology.num_chips} chips of {topology.name}"
        )
    mesh = replace(config.mesh, platform="tpu", data=data, fsdp=topology.num_chips // data)
    return replace(config, mesh=mesh)


def refusal(
    config: RunConfig, topology: Topology, message: str, argument_names: Mapping[int, str]
) -> dict[str, Any] | None:
    """The report of a step that does not fit HBM, from the compiler's message; None if that cannot
    be read, or tells of another memory."""
    from train.compile.buffers import buffers_of_message
    from train.compile.exhausted import parse_exhausted
    from train.compile.remedies import best_remedies

    exhausted = parse_exhausted(message)
    if exhausted is None or exhausted.space != "hbm":
        return None
    remedies = best_remedies(config, topology, next_larger(topology), exhausted.used_bytes)
    return {
        "preset": config.name,
        "topology": topology.name,
        "fits": False,
        "memory": {
            "peak": exhausted.used_bytes,
            "available": exhausted.available_bytes,
            "exceeded": exhausted.excess_bytes,
        },
        "largest_buffers": [
            asdict(b) for b in buffers_of_message(exhausted.allocations, argument_names)
        ],
        "recompute": _recomputation(config, topology.num_chips),
        "remedies": [asdict(remedy) for remedy in remedies],
        "collectives": [],
        "time_by_kind": [],
        "modelled_step_s": None,
        "unknowns": ["all but memory: the compiler gave no program"],
    }


def _accept(
    config: RunConfig, topology: Topology, step: TracedStep, program: Program
) -> dict[str, Any]:
    """The report of a compiled step."""
    from train.compile import hlo
    from train.compile.buffers import buffers_at_peak
    from train.compile.kernels import schedules
    from train.compile.report import make_report

    module = hlo.Program(program.hlo)
    is_modelled = topology.chip == V6E
    report = make_report(
        config.name,
        topology.name,
        program,
        topology.chip,
        schedules=schedules(module, step.kernels) if is_modelled else (),
        workload=_workload(config, topology.num_chips),
        routing=_routing(config, topology.num_chips) if is_modelled else None,
    )
    assert program.assignment is not None, "compile_step gives one"
    buffers = buffers_at_peak(module, program.assignment.peak, step.argument_names)
    found = report.to_dict() | {"largest_buffers": [asdict(buffer) for buffer in buffers]}
    found["recompute"] = _recomputation(config, topology.num_chips)
    if not is_modelled:
        found["unknowns"] = [f"every time: the model is v6e's, not {topology.chip.name}'s"]
        found["unknowns"] += report.unknowns
    return found


def _write(report: dict[str, Any], folder: Path, console: Console) -> None:
    """report.json, report.md and pictures into `folder`, tables onto the terminal."""
    from train.compile.pictures import draw_report

    (folder / "report.json").write_text(json.dumps(report, indent=2))
    views = report_views(report)
    title = f"{report['preset']} on {report['topology']}: what the compiler says"
    pictures = draw_report(report, folder)
    (folder / "report.md").write_text(markdown_document(title, views, pictures))
    for view in views:
        console.print(view.rich())
    console.print(f"report: {folder}")


def _distinct(first: str, second: str) -> tuple[str, str]:
    """Short names of two files: the folders that tell them apart."""
    pair = Path(first).parent.name, Path(second).parent.name
    return pair if pair[0] != pair[1] and all(pair) else (first, second)


def _workload(config: RunConfig, num_chips: int) -> Workload:
    from torch_gemma4.accounting import training_flops
    from train.compile.report import Workload

    sequences, length = config.data.batch_size / num_chips, config.data.sequence_length
    table = training_flops(config.model, sequence_length=length, sequences_per_chip=1)
    return Workload(tokens=round(sequences * length), flops=round(sequences * table.training))


def _routing(config: RunConfig, num_chips: int) -> str | None:
    """What kernels.py assumes, None where nothing is routed."""
    model = config.model
    if not model.enable_moe_block:
        return None
    sequences = config.data.batch_size // (num_chips * config.accumulate)
    tokens = sequences * config.data.sequence_length
    return (
        f"each of {tokens:,} tokens a chip chooses {model.top_k_experts} of {model.num_experts} "
        "experts uniformly at random, seed 0"
    )


def _recomputation(config: RunConfig, num_chips: int) -> dict[str, Any]:
    """What the policy keeps and runs again, by arithmetic."""
    from torch_gemma4.recompute_cost import recompute_cost

    cost = recompute_cost(
        config.model,
        config.recompute,
        sequence_length=config.data.sequence_length,
        sequences_per_chip=config.data.batch_size // num_chips,
        micro_batches=config.accumulate,
        compute_bytes=getattr(torch, config.precision.compute).itemsize,
    )
    return {
        "policy": config.recompute,
        "flops": cost.total_flops,
        "counted_flops": _workload(config, num_chips).flops,
        "kept_bytes": cost.kept_bytes,
        "kept_on_host": config.offload_activations,
    }


def _provenance(config: RunConfig) -> dict[str, Any]:
    """What a number needs to be believed."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    ).stdout.strip()
    return {
        "flags": [
            {"name": name, "value": value, "reason": reason}
            for name, value, reason in libtpu_flags()
        ],
        "versions": {name: version(name) for name in _PACKAGES},
        "commit": commit or None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": json.loads(config.to_json()),
    }
