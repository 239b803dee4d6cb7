"""Static profile of kernels compiled for v6e. No TPU: every time here is modelled, none measured.

    python -m benchmarks.kernel_profile --op gmm --shape "wi forward" --routing worst
    python -m benchmarks.kernel_profile --op tgmm                       every shape of one op
    python -m benchmarks.kernel_profile --calibrate                     beside published times

The machinery is the product's (train/compile/static/): the compiler's final schedule gives bundles,
issue slots and VMEM, the traced kernel its steps and copies, and both a time. Kernels are listed in
kernel_registry.py. Calibration compiles public kernels with published times on a v6e.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import kernel_registry
from benchmarks.kernel_entry import Kernel
from benchmarks.kernel_registry import CALIBRATION, OPS, PEERS
from benchmarks.routings import ROUTINGS, group_sizes
from pallas_ops import bridge
from pallas_ops.chips import V6E
from pallas_ops.tiling import Tiles
from train.compile.static.dump import compile_with_dump
from train.compile.static.grid_steps import only_call, window_steps
from train.compile.static.kernel_steps import KernelSteps, PipelineSteps
from train.compile.static.own_copies import OWN_COPIES
from train.compile.static.schedule import (
    VMATMUL_CYCLES,
    VMATMUL_FLOPS,
    Schedule,
    read_schedule,
)
from train.compile.static.step_time import EVERY_STEP, Visit, kernel_regions
from train.compile.static.visits import find_visits, match_visits

MODELLED = "modelled from the compiler's static schedule, not measured"


@dataclass(frozen=True)
class Options:
    """Estimate kernels on v6e from the compiler's final schedule."""

    op: str | None = None
    """An op of the registry, or "all" of ours; without it all, or with --calibrate none."""
    shape: str | None = None
    """A shape of the op; all if left out."""
    routing: Literal["balanced", "worst", "aligned", "zipf", "one hot", "all"] = "balanced"
    """Rows of each group, see benchmarks/routings.py."""
    tiles: tuple[int, int, int] | None = None
    """Rows, k and n of a tile, instead of the op's own choice."""
    calibrate: bool = False
    """Profile public kernels too, beside their published times."""
    json: bool = False
    """Print JSON rows, no table."""
    out: Path | None = None
    """File for the JSON rows."""

    def __post_init__(self) -> None:
        if self.op in (None, "all") and (self.shape is not None or self.tiles is not None):
            raise ValueError("shape and tiles belong to one op; name it with --op")

    @property
    def routings(self) -> tuple[str, ...]:
        """Names of the routings asked for."""
        return ROUTINGS if self.routing == "all" else (self.routing,)


def selected(options: Options) -> list[Kernel]:
    """Kernels asked for. Raises ValueError, naming what is known."""
    tiles = None if options.tiles is None else Tiles(*options.tiles)
    if options.op is not None and options.shape is not None:
        found = [kernel_registry.find(options.op, options.shape, tiles)]
    else:
        ours = [op for op in OPS if op not in (*CALIBRATION, *PEERS)]
        if options.op is None:
            ops = [] if options.calibrate else ours
        else:
            ops = ours if options.op == "all" else [options.op]
        found = [
            kernel
            for op in ops
            for kernel in kernel_registry.kernels(op, tiles).values()
            if not kernel.is_tiny
        ]
    if options.calibrate:
        found += [k for op in CALIBRATION for k in kernel_registry.kernels(op).values()]
    return found


def profile(kernel: Kernel, routings: tuple[str, ...]) -> list[dict[str, Any]]:
    """Compiles a kernel once; one row a routing, or one row if routing does not concern it."""
    with tempfile.TemporaryDirectory(prefix="kernel_profile_") as folder:
        seconds = compile_with_dump(
            f"{kernel.op} {kernel.shape!r}", lowered(kernel), Path(folder), kernel.libtpu_flags
        )
        schedule = read_schedule(Path(folder), kernel.compiled_name)
    rows = []
    for routing in routings if kernel.routed else ("none",):
        known = {i: group_sizes(routing, *sizes) for i, sizes in kernel.routed.items()}
        row = estimate(kernel, schedule, _steps(kernel, schedule, known))
        head = {"op": kernel.op, "shape": kernel.shape, "routing": routing}
        rows.append({**head, **row, "compile_s": round(seconds, 2)})
    return rows


def _steps(kernel: Kernel, schedule: Schedule, known: dict[int, np.ndarray]) -> KernelSteps:
    if not kernel.is_pallas:
        return PipelineSteps(window_steps(schedule.copies), kernel.visits)
    fn = functools.partial(kernel.fn, **kernel.static, interpret=False)
    call = only_call(fn, kernel.signature, known)
    if call.name in OWN_COPIES:
        return OWN_COPIES[call.name](call)
    grid = call.steps()
    visits = kernel.visits
    if visits is None:
        visits = _matched(kernel, schedule, find_visits(call, grid))
    return PipelineSteps(grid, visits)


def _matched(kernel: Kernel, schedule: Schedule, found: tuple[Visit, ...]) -> tuple[Visit, ...]:
    """Raises ValueError where the compiler left other regions than the body has."""
    matched = match_visits(found, len(kernel_regions(schedule)))
    if matched is None:
        raise ValueError(
            f"{kernel.op} {kernel.shape!r}: the compiler left {len(kernel_regions(schedule))} "
            f"regions of the body's {len(found)}; name their visits in the registry"
        )
    return matched


def lowered(kernel: Kernel) -> bytes:
    """A kernel's StableHLO for a TPU, as MLIR bytecode."""
    from jax._src.interpreters import mlir

    module = bridge.lower(kernel.fn, kernel.signature, static=kernel.static, target="tpu")
    return mlir.module_to_bytecode(module.compiler_ir("stablehlo"))


def estimate(kernel: Kernel, schedule: Schedule, steps: KernelSteps) -> dict[str, Any]:
    """The figures of one row, from a schedule and the steps that execute it."""
    regions = {name: int(each) for name, each in steps.regions(schedule).items()}
    bundles = steps.bundles(schedule)
    vmatmuls = steps.sums(schedule, schedule.vmatmuls)
    occupancy = {
        unit: round(steps.sums(schedule, used).sum() / bundles.sum() / schedule.capacity[unit], 4)
        for unit, used in schedule.slots.items()
    }
    time = steps.time(schedule)
    live = bundles > (regions.get(EVERY_STEP, 0) if len(regions) > 1 else 0)
    in_dump = {copy.nbytes for copy in schedule.copies} - {None}
    row = {
        "source": MODELLED,
        "tiles": list(steps.tiles),
        "est_us": round(1e6 * time.total, 3),
        "useful_tflops": round(kernel.flops / time.total / 1e12, 1),
        "frac_peak": round(kernel.flops / time.total / V6E.peak_bf16_flops, 4),
        "dma_bytes": steps.dma_bytes,
        "frac_bandwidth": round(steps.dma_bytes / time.total / V6E.hbm_bytes_per_s, 4),
        "bundles": int(bundles.max()),
        "bundles_mean": round(float(bundles.mean()), 1),
        "bundles_by_region": regions,
        "mxu_floor_bundles": int(vmatmuls.max()) * VMATMUL_CYCLES // 2,
        "mxu_useful": round(kernel.flops / (VMATMUL_FLOPS * float(vmatmuls.sum())), 4),
        "mxu_occupancy": occupancy["MXU"],
        "occupancy": occupancy,
        "num_steps": steps.num_steps,
        "num_live_steps": int(live.sum()),
        "num_dma_bound_steps": time.num_dma_bound,
        "compute_us": round(1e6 * time.compute, 1),
        "dma_us": round(1e6 * time.dma, 1),
        "dma_bytes_a_step": round(steps.dma_bytes / steps.num_steps),
        "dump_confirms_block_bytes": steps.copy_sizes is None or in_dump <= steps.copy_sizes,
        "vmem_bytes": schedule.vmem_bytes,
        "published_us": None if kernel.published_ms is None else 1e3 * kernel.published_ms,
        "estimate_over_published": None
        if kernel.published_ms is None
        else round(1e3 * time.total / kernel.published_ms, 3),
        "note": kernel.note,
    }
    if steps.useful_rows is not None:
        row["useful_rows"] = round(steps.useful_rows, 4)
    return row


def provenance(module: str = "benchmarks.kernel_profile") -> dict[str, Any]:
    """Versions, command (`python -m` of a module), date and commit of every row."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    dirty = "-dirty" if git("status", "--porcelain", "--", "../pallas_ops") else ""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "--short", "HEAD") + dirty,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the tables."""
    table = Table(title="v6e, one core: modelled", caption=f"{MODELLED}; a bundle is a cycle")
    for heading in ("op", "shape", "routing", "tiles"):
        table.add_column(heading, overflow="fold")
    numbers = (
        "est us",
        "TFLOP/s",
        "peak",
        "MXU",
        "GB",
        "bandwidth",
        "bundles",
        "steps",
        "VMEM MiB",
    )
    for heading in numbers:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            *(row[key] for key in ("op", "shape", "routing")),
            " ".join(row["tiles"]),
            f"{row['est_us']:,.0f}",
            f"{row['useful_tflops']:,.0f}",
            f"{row['frac_peak']:.1%}",
            f"{row['mxu_occupancy']:.1%}",
            f"{row['dma_bytes'] / 1e9:.2f}",
            f"{row['frac_bandwidth']:.1%}",
            f"{row['bundles']:,}",
            f"{row['num_live_steps']}/{row['num_steps']}",
            f"{row['vmem_bytes'] / (1 << 20):.1f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    published = [row for row in rows if row["published_us"] is not None]
    if published:
        table = Table(title="Calibration: estimate over published time")
        for heading in ("kernel", "routing", "estimate us", "published us", "ratio", "why"):
            table.add_column(heading, overflow="fold")
        for row in published:
            table.add_row(
                f"{row['op']} {row['shape']}",
                row["routing"],
                f"{row['est_us']:,.0f}",
                f"{row['published_us']:,.0f}",
                f"{row['estimate_over_published']:.3f}",
                row["note"],
            )
        console.print(table)
    if not all(row["dump_confirms_block_bytes"] for row in rows):
        console.print("The dump has copies of other sizes than the blocks': DMA is uncertain.")


def main(options: Options) -> None:
    """Profile, print, write."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # grids are evaluated; nothing looks for a TPU
    rows = []
    for kernel in selected(options):
        rows += [row | provenance() for row in profile(kernel, options.routings)]
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows)


if __name__ == "__main__":
    main(tyro.cli(Options))
