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

    from train.compile.report import Report, Workload
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
    from train.compile.hlo import Program
    from train.compile.kernels import schedules
    from train.compile.report import make_report
    from train.compile.trace import trace_step

    console = Console()
    console.print(f"{config.name} for {topology.name}: tracing, then compiling (minutes)")
    folder = Path(out) / f"{config.name}-{topology.name}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        step = trace_step(config)
        program = compile_step(step, topology)
    except DoesNotFit as error:
        (folder / "does_not_fit.txt").write_text(str(error))
        raise SystemExit(
            f"does not fit {topology.name}: {format_bytes(topology.chip.hbm_bytes)} a chip. The "
            f"compiler's own words are in {folder / 'does_not_fit.txt'}. Remedies: fewer or "
            "shorter sequences a chip (--data.batch_size, --data.sequence_length), --recompute, "
            "more --model.num_loss_tiles"
        ) from None
    console.print("compiling its kernels alone, for their schedules")
    report = make_report(
        config.name,
        topology.name,
        program,
        topology.chip,
        schedules=schedules(Program(program.hlo), step.kernels),
        workload=_workload(config, topology.num_chips),
    )
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
        (
            use.kind,
            f"{use.count:,}",
            format_bytes(use.bytes),
            f"{use.num_asynchronous:,}",
            f"{1e3 * use.link_s:,.1f}",
        )
        for use in report.collectives
    ]
    times = [
        (
            kind.kind,
            f"{kind.count:,}",
            format_bytes(kind.bytes),
            f"{1e3 * kind.modelled_s:,.1f}",
            f"{1e3 * kind.compiler_s:,.1f}",
        )
        for kind in report.time_by_kind
    ]
    kernels = [
        (time.name, time.shapes, f"{time.count:,}", f"{1e3 * time.modelled_s:,.1f}", time.source)
        for time in report.kernels
    ]
    total = f"{1e3 * report.modelled_step_s:,.1f}"
    sums = [("modelled step", "", "", total, "")]
    if report.modelled_mfu is not None:
        rate = f"{report.modelled_tokens_per_s:,.0f} tokens/s a chip, "
        sums.append((f"as {rate}MFU {report.modelled_mfu:.1%}", "", "", "", ""))
    unknowns = [(unknown,) for unknown in report.unknowns]
    return [
        text_table(f"{report.preset} on {report.topology}: {verdict}", ("HBM", "a chip"), memory),
        text_table(
            "Collectives of a step (link ms: at the published rate, a lower bound)",
            ("", "executed", "bytes", "asynchronous", "link ms"),
            collectives,
        ),
        text_table(
            "Modelled time of a step (not measured); the compiler's own beside, not summed",
            ("", "executed", "HBM bytes", "ms", "compiler ms"),
            [*times, *sums],
        ),
        text_table("Kernels, in the kinds above", ("", "results", "executed", "ms", ""), kernels),
        text_table("Not known, or not in the modelled step", ("",), unknowns),
    ]


def _workload(config: RunConfig, num_chips: int) -> Workload:
    from torch_gemma4.accounting import training_flops
    from train.compile.report import Workload

    sequences, length = config.data.batch_size / num_chips, config.data.sequence_length
    table = training_flops(config.model, sequence_length=length, sequences_per_chip=1)
    return Workload(tokens=round(sequences * length), flops=round(sequences * table.training))


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
