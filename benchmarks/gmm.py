"""The six grouped products of a 26B layer on one v6e, beside public kernels. Modelled, no TPU.

    python -m benchmarks.gmm                      everything, into benchmarks/results/gmm_v6e.json
    python -m benchmarks.gmm --product "wi drhs"  one product; other rows of the file stay
    python -m benchmarks.gmm --kind ours          one kind of kernel

Rows of a product and kind replace those of the file, which is written after each, so a run that
stops loses one kernel. Kinds: ours; megablox of jax 0.7.1, each of a few tiles, the best marked;
plain XLA's ragged_dot, by the compiler's own cycle counts.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import kernel_profile, kernel_registry, megablox, ragged_dot
from pallas_ops.chips import V6E
from pallas_ops.gmm.shapes import GEMMA4_26B as GMM_SHAPES
from pallas_ops.tgmm.shapes import GEMMA4_26B as TGMM_SHAPES
from pallas_ops.tgmm.shapes import TgmmShape
from pallas_ops.tiling import Tiles

ROUTINGS = ("balanced", "zipf", "one hot")
PRODUCTS = {shape.name: shape for shape in GMM_SHAPES}
PRODUCTS |= {f"{s.name}, {dtype}": s for s in TGMM_SHAPES for dtype in ("float32", "bfloat16")}


@dataclass(frozen=True)
class Options:
    """Compare grouped matmuls on v6e by the compiler's final schedules."""

    product: str | None = None
    """A product, or the beginning of its name; all if left out."""
    kind: Literal["ours", "megablox", "xla"] | None = None
    """Kernels to compile; all kinds if left out."""
    out: Path = Path(__file__).parent / "results" / "gmm_v6e.json"
    """File of the rows."""

    def __post_init__(self) -> None:
        if not self.products:
            raise ValueError(f"product={self.product!r} is none of {sorted(PRODUCTS)}")

    @property
    def products(self) -> list[str]:
        """Names of the products asked for."""
        return [name for name in PRODUCTS if name.startswith(self.product or "")]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of kernels asked for."""
        return ("ours", "megablox", "xla") if self.kind is None else (self.kind,)


def columns_useful(shape: Any) -> float:
    """Part of the columns that a matrix unit works on which are not its own filling.

    A weight's gradient contracts rows: K streams through, 16 at a time, and N fills the unit. The
    other products contract K, and both K and N fill it.
    """
    streamed = V6E.row_group if isinstance(shape, TgmmShape) else V6E.mxu_width
    sizes = ((shape.size_k, streamed), (shape.size_n, V6E.mxu_width))
    return shape.size_k * shape.size_n / (_up(*sizes[0]) * _up(*sizes[1]))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def measure(product: str, kind: str) -> list[dict[str, Any]]:
    """Rows of one product by one kind of kernel; one row that says why, where it does not
    compile."""
    shape = PRODUCTS[product]
    head = {"product": product, "kind": kind}
    if kind == "xla":
        return [head | ragged_dot.estimate(product, shape.flops)]
    choices: list[Tiles | None] = [None]
    if kind == "megablox":
        is_tgmm = isinstance(shape, TgmmShape)
        choices = megablox.candidates(shape.size_k, shape.size_n, is_tgmm=is_tgmm)
    op = "megablox_26b" if kind == "megablox" else "tgmm" if isinstance(shape, TgmmShape) else "gmm"
    found = []
    for tiles in choices:
        kernel = kernel_registry.find(op, product, tiles)
        try:
            rows = kernel_profile.profile(kernel, ROUTINGS)
        except (RuntimeError, ValueError) as error:  # it does not compile, or not as known
            found.append(head | {"tiles": str(tiles), "error": str(error)[:300]})
            continue
        for row in rows:
            useful = row.get("useful_rows")
            if useful is None:
                useful = min(1.0, row["mxu_useful"] / columns_useful(shape))
            found.append(head | row | {"rows_useful": round(useful, 4)})
    return mark_best(found)


def mark_best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds `best`: whether a row is the fastest of its routing, of one product and kind."""
    times: dict[str, float] = {}
    for row in rows:
        if "est_us" in row:
            routing = row["routing"]
            times[routing] = min(row["est_us"], times.get(routing, row["est_us"]))
    return [
        row | {"best": row["est_us"] == times[row["routing"]]} if "est_us" in row else row
        for row in rows
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table: the best of each kind."""
    table = Table(title="Grouped products of a 26B layer, v6e: modelled, not measured")
    for heading in ("product", "kernel", "routing"):
        table.add_column(heading)
    for heading in ("est us", "TFLOP/s", "peak", "rows", "VMEM MiB", "compile s"):
        table.add_column(heading, justify="right")
    for row in rows:
        if "est_us" not in row:
            table.add_row(row["product"], row["kind"], row.get("error", "")[:60])
        elif row["best"]:
            table.add_row(
                *(row[key] for key in ("product", "kind", "routing")),
                f"{row['est_us']:,.0f}",
                f"{row['useful_tflops']:,.0f}",
                f"{row['frac_peak']:.1%}",
                f"{row['rows_useful']:.1%}" if "rows_useful" in row else "",
                f"{row['vmem_bytes'] / (1 << 20):.1f}" if "vmem_bytes" in row else "",
                f"{row['compile_s']:.0f}",
            )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main(options: Options) -> None:
    """Profile, write, print."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # tables are evaluated; nothing looks for a TPU
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for product in options.products:
        for kind in options.kinds:
            new = [
                row | kernel_profile.provenance("benchmarks.gmm") for row in measure(product, kind)
            ]
            rows = [row for row in rows if (row["product"], row["kind"]) != (product, kind)] + new
            order = list(PRODUCTS)
            rows.sort(key=lambda row: order.index(row["product"]))
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main(tyro.cli(Options))
