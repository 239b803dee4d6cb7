"""permute, combine and their gradients at the shape of one chip of the 26B run, compiled for v6e.

    python -m benchmarks.combine                writes benchmarks/results/combine_v6e.json
    python -m benchmarks.combine --only NAME    prints the rows of one program

No TPU: every time is modelled, none measured. Kernels: the compiler's final schedule and the exact
traffic of a routing (train/compile/static/dispatch_steps.py). Plain XLA: bytes that the optimised
program names, at 1.4 TB/s; no trustworthy figure exists for its gathers, so those rows say
`trusted: false`.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.combine_programs import KERNELS, PLAN, SHAPE, compile_program, programs
from benchmarks.kernel_profile import provenance
from pallas_ops.chips import MIB, V6E
from pallas_ops.routing.blocks import BLOCK
from train.compile.static.grid_steps import only_call
from train.compile.static.kernel_steps import KernelSteps
from train.compile.static.own_copies import OWN_COPIES
from train.compile.static.routings import random_windows
from train.compile.static.schedule import Schedule, read_schedule
from train.compile.static.step_time import CLOCK_HZ

RESULTS = Path(__file__).parent / "results" / "combine_v6e.json"
HBM_BYTES_PER_S = 1.4e12
"""What XLA's own data movement is taken to reach."""
ROUTINGS = {"balanced": 0.0, "skewed": 1.0}
"""Exponent of a Zipf law over experts, from which each token draws distinct ones."""
SORTS_S_A_LAYER = 49.1e-3 / 30
"""Measured on v6e-128: sorts took 49.1 ms of a step of 30 layers before the published MaxText
recipe replaced any (spec moe-kernels.md 3.7). libtpu has no estimate: 80 cycles for an argsort."""
PLANS_A_LAYER = 2
"""Forward, and recomputed."""
_ARRAY = re.compile(r"(bf16|f32|s32|pred)\[([\d,]*)\](?:\{[^{}]*?(S\(1\))?[^{}()]*\})?")
_SIZE = {"bf16": 2, "f32": 4, "s32": 4, "pred": 1}
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota")


@dataclass(frozen=True)
class Options:
    """Compare the dispatch kernels with plain XLA."""

    only: str | None = None
    """One program; nothing is written then."""
    out: Path = RESULTS
    """File for the rows."""

    def __post_init__(self) -> None:
        if self.only is not None and self.only not in programs():
            raise ValueError(f"only={self.only!r} is unknown; use one of {sorted(programs())}")


def steps_of(name: str, routing: str) -> KernelSteps:
    """Steps of a kernel of the production shape. Raises KeyError for an unknown routing."""
    windows = random_windows(
        SHAPE.num_tokens, SHAPE.top_k, SHAPE.num_experts, BLOCK, ROUTINGS[routing]
    )
    program = programs()[name]
    names = list(inspect.signature(program.fn).parameters)
    known = {names.index(table): value for table, value in windows.items()}
    call = only_call(functools.partial(program.fn, interpret=False), program.signature, known)
    return OWN_COPIES[call.name](call)


def kernel_rows(name: str, schedule: Schedule) -> list[dict[str, Any]]:
    """One row a routing."""
    found = []
    for routing in ROUTINGS:
        steps = steps_of(name, routing)
        bundles, time, nbytes = steps.bundles(schedule), steps.time(schedule), steps.dma_bytes
        moves = 2 if name == "combine backward" else 1
        least = SHAPE.num_tokens * (1 + moves * SHAPE.top_k)
        bound = nbytes / V6E.hbm_bytes_per_s
        found.append(
            {
                "program": name,
                "routing": routing,
                "modelled_us": round(1e6 * time.total, 1),
                "compute_us": round(1e6 * time.compute, 1),
                "memory_us": round(1e6 * bound, 1),
                "over_memory_bound": round(time.total / bound, 3),
                "memory_us_at_1400_gb_s": round(1e6 * nbytes / HBM_BYTES_PER_S, 1),
                "hbm_bytes": nbytes,
                "widening": round(nbytes / (2 * SHAPE.width * least), 3),
                "bundles_a_block": round(float(bundles.mean())),
                "blocks_bound_by_memory": time.num_dma_bound,
                "vmem_mib": round(schedule.vmem_bytes / MIB, 1),
                "trusted": True,
            }
        )
    return found


def hbm_bytes(hlo: str) -> tuple[int, int, list[str]]:
    """Bytes of HBM that the instructions of the entry read and write, the compiler's cycles, and
    the data-dependent opcodes inside. Arrays that the compiler keeps in VMEM cost nothing."""
    entry = hlo[hlo.index("\nENTRY ") :]
    shapes: dict[str, str] = {}
    nbytes = cycles = 0
    for line in entry.splitlines()[1:]:
        match = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.+?) ([\w\-]+)\((.*)", line)
        if match is None:
            continue
        name, shape, opcode, rest = match.groups()
        shapes[name] = shape
        if opcode in _FREE or opcode.endswith("-done"):
            continue
        operands = re.findall(r"%([\w.\-]+)", rest.split(")", 1)[0])
        nbytes += sum(_array_bytes(shapes.get(each, "")) for each in (*operands, name))
        estimate = re.search(r'"estimated_cycles":"(\d+)"', rest)
        cycles += int(estimate[1]) if estimate else 0
    inside = {op for op in ("gather", "scatter", "sort") if re.search(rf" {op}\(", hlo)}
    return nbytes, cycles, sorted(inside)


def _array_bytes(shape: str) -> int:
    total = 0
    for dtype, dims, in_vmem in _ARRAY.findall(shape):
        if not in_vmem:
            total += _SIZE[dtype] * math.prod(int(d) for d in dims.split(",") if d)
    return total


def xla_row(name: str, hlo: str) -> dict[str, Any]:
    """The row of a program without kernels."""
    nbytes, cycles, inside = hbm_bytes(hlo)
    return {
        "program": name,
        "modelled_us": round(1e6 * nbytes / HBM_BYTES_PER_S, 1),
        "hbm_bytes": nbytes,
        "estimated_cycles": cycles,
        "data_dependent": inside,
        "trusted": not inside,
    }


def plan_row(hlo: str, folder: Path) -> dict[str, Any]:
    """The plan: bundles of every fusion, its loop as often as the compiler says."""
    row = xla_row(PLAN, hlo)
    total = small = 0
    for line in hlo[hlo.index("\nENTRY ") :].splitlines():
        match = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = .*? fusion\(", line)
        bounds = re.search(r'"iteration_bounds":\[([^\]]*)\]', line)
        if match is None or bounds is None:
            continue
        turns = math.prod(int(n) for n in re.findall(r"\d+", bounds[1]))
        schedule = read_schedule(folder, match[1])
        loops = [r.last - r.first for r in schedule.roots if r.kind == "loop"]
        total += schedule.num_bundles + (turns - 1) * max(loops, default=0)
        small += schedule.num_bundles < 500 and turns == 1
    seconds = total / CLOCK_HZ
    return row | {
        "static_us": round(1e6 * seconds, 1),
        "static_bundles": total,
        "small_fusions": small,
        "published_sorts_us": round(1e6 * SORTS_S_A_LAYER, 1),
        "of_published_sorts": round(PLANS_A_LAYER * seconds / SORTS_S_A_LAYER, 3),
        "note": "bundles of the schedules, without what starting an operation costs; a layer makes "
        "the plan twice, forward and recomputed; the published sorts are all of a layer's",
    }


def ragged_forms() -> dict[str, Any]:
    """What jax has under that name."""
    import jax

    names = sorted(name for name in dir(jax.lax) if name.startswith("ragged"))
    return {
        "program": "jax's ragged forms",
        "forms": names,
        "compiled": [],
        "note": "none moves rows by an index inside one chip: they are grouped products, which "
        "need sorted rows, and an exchange of one run of rows a pair of devices",
    }


def rows_of(name: str) -> list[dict[str, Any]]:
    """Compiles one program; its rows."""
    is_kernel = name in KERNELS
    dump = is_kernel or name == PLAN
    with tempfile.TemporaryDirectory(prefix="combine_") as path:
        folder = Path(path)
        compiled = compile_program(name, folder, dump=dump)
        hlo = (folder / "module.hlo").read_text()
        if is_kernel:
            found = kernel_rows(name, read_schedule(folder, programs()[name].fn.__name__))
        elif name == PLAN:
            found = [plan_row(hlo, folder)]
        else:
            found = [xla_row(name, hlo)]
    return [row | compiled for row in found]


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title="v6e, one core: modelled, not measured")
    for heading in ("program", "routing"):
        table.add_column(heading)
    for heading in ("us", "of memory bound", "GB", "widening", "trusted"):
        table.add_column(heading, justify="right")
    for row in rows:
        if "hbm_bytes" not in row:
            continue
        table.add_row(
            row["program"],
            row.get("routing", ""),
            f"{row.get('static_us', row['modelled_us']):,.0f}",
            str(row.get("over_memory_bound", "")),
            f"{row['hbm_bytes'] / 1e9:.2f}",
            str(row.get("widening", "")),
            "yes" if row["trusted"] else "no",
        )
    Console(width=110).print(table)


def main(options: Options) -> None:
    """Compile, print, write."""
    names = programs() if options.only is None else [options.only]
    rows = [row for name in names for row in rows_of(name)]
    if options.only is None:
        rows.append(ragged_forms())
        document = {**provenance(), "shape": vars(SHAPE), "rows": rows}
        document["command"] = "python -m benchmarks.combine"
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main(tyro.cli(Options))
