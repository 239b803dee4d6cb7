"""`python -m train compile`: trace, compile, report."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from train.compile.topology import Topology, find_topology
from train.launch import prepare_tracing
from train.tables import format_bytes, text_table

if TYPE_CHECKING:
    from rich.table import Table

    from train.compile.report import Report
    from train.config import RunConfig

_PACKAGES = ("torch", "torch_xla", "jax", "libtpu")


def compile_and_report(config: RunConfig, topology_name: str, out: str) -> Path:
    """Compiles one step of `config` for a slice and writes the report; returns its folder.

    The mesh's fsdp axis is set to fill the slice. Raises ValueError for an unknown topology or one
    that the mesh's data axis or the batch does not divide, and SystemExit where the step does not
    fit.
    """
    topology = find_topology(topology_name)
    config = on_topology(config, topology)
    prepare_tracing()
    from train.compile.compiler import DoesNotFit, compile_step
    from train.compile.report import make_report
    from train.compile.trace import trace_step

    console = Console()
    console.print(f"{config.name} for {topology.name}: tracing, then compiling (minutes)")
    folder = Path(out) / f"{config.name}-{topology.name}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        program = compile_step(trace_step(config), topology)
    except DoesNotFit as error:
        (folder / "does_not_fit.txt").write_text(str(error))
        raise SystemExit(
            f"does not fit {topology.name}: {format_bytes(topology.chip.hbm_bytes)} a chip. The "
            f"compiler's own words are in {folder / 'does_not_fit.txt'}. Remedies: fewer or "
            "shorter sequences a chip (--data.batch_size, --data.sequence_length), --recompute, "
            "more --model.num_loss_tiles"
        ) from None
    report = make_report(config.name, topology.name, program, topology.chip)
    (folder / "program.hlo").write_text(program.hlo)
    (folder / "report.json").write_text(
        json.dumps(report.to_dict() | _provenance(config), indent=2)
    )
    tables = report_tables(report)
    for table in tables:
        console.print(table)
    with open(folder / "report.md", "w") as file:
        plain = Console(file=file, width=100)
        for table in tables:
            plain.print(table)
    console.print(f"report and program: {folder}")
    return folder


def on_topology(config: RunConfig, topology: Topology) -> RunConfig:
    """`config` with a mesh of the topology's chips. Raises ValueError if its data axis does not
    divide them."""
    data = config.mesh.data
    if topology.num_chips % data:
        raise ValueError(
            f"mesh.data = {data}: does not divide the {topology.num_chips} chips of {topology.name}"
        )
    mesh = replace(config.mesh, platform="tpu", fsdp=topology.num_chips // data)
    return replace(config, mesh=mesh)


def report_tables(report: Report) -> list[Table]:
    """The report for a person."""
    verdict = "fits" if report.fits else "DOES NOT FIT"
    memory = [(name, format_bytes(size)) for name, size in report.memory.items()]
    collectives = [
        (use.kind, f"{use.count:,}", format_bytes(use.bytes), f"{use.num_asynchronous:,}")
        for use in report.collectives
    ]
    times = [
        (
            kind.kind,
            f"{kind.count:,}",
            format_bytes(kind.bytes),
            "unknown" if kind.modelled_s is None else f"{1e3 * kind.modelled_s:,.1f}",
        )
        for kind in report.time_by_kind
    ]
    total = f"{1e3 * report.modelled_step_s:,.1f}"
    unknowns = [(unknown,) for unknown in report.unknowns]
    return [
        text_table(f"{report.preset} on {report.topology}: {verdict}", ("HBM", "a chip"), memory),
        text_table("Collectives of a step", ("", "executed", "bytes", "asynchronous"), collectives),
        text_table(
            "Modelled time of a step (not measured)",
            ("", "executed", "bytes", "ms"),
            [*times, ("modelled step", "", "", total)],
        ),
        text_table("Not in the modelled step", ("",), unknowns),
    ]


def _provenance(config: RunConfig) -> dict[str, object]:
    """What a number needs to be believed."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    ).stdout.strip()
    return {
        "versions": {name: version(name) for name in _PACKAGES},
        "commit": commit or None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": json.loads(config.to_json()),
    }
