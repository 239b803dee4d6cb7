"""Tables for a person at a terminal or a log of 80 columns: nothing is cut off.

Only rich is imported: what `python -m train info` prints needs no torch_xla.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from train.sharding import ShardingRow, Spec


def text_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of text, numbers to the right of names; a row that begins with "total" stands out.
    What does not fit is folded, never cut."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False  # so that names fit into 80 columns
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        # Escaped: rich would take the brackets of a pattern for markup.
        table.add_row(*map(escape, row), style="bold" if row[0] == "total" else None)
    return table


def sharding_view(rows: Sequence[ShardingRow]) -> Table:
    """Where every parameter lies on the mesh, a row each, and their bytes on one chip."""
    total = sum(row.bytes_per_chip for row in rows)
    return text_table(
        "Parameters on the mesh, by the rules in train/sharding.py",
        ("parameter", "shape (axis)", "a chip"),
        [
            *(
                (row.parameter, layout(row.shape, row.spec), format_bytes(row.bytes_per_chip))
                for row in rows
            ),
            ("total", "", format_bytes(total)),
        ],
    )


def rule_view(rows: Sequence[ShardingRow]) -> Table:
    """The same by rule: which dimension each pattern of parameters is split along, counted from the
    end, and the bytes of all its parameters on one chip."""
    by_rule: dict[tuple[str, str], list[ShardingRow]] = {}
    for row in rows:
        by_rule.setdefault((row.pattern, _split(row.spec)), []).append(row)
    total = sum(row.bytes_per_chip for row in rows)
    return text_table(
        "Parameters on the mesh by rule (each one: train info)",
        ("pattern", "split", "tensors", "a chip"),
        [
            *(
                (
                    pattern,
                    split,
                    str(len(matched)),
                    format_bytes(sum(row.bytes_per_chip for row in matched)),
                )
                for (pattern, split), matched in by_rule.items()
            ),
            ("total", "", str(len(rows)), format_bytes(total)),
        ],
    )


def _split(spec: Spec) -> str:
    split = [f"dim {dim - len(spec)} over {axis}" for dim, axis in enumerate(spec) if axis]
    return ", ".join(split) or "whole"


def format_flops(flops: float) -> str:
    """Such as 3.203 GFLOP, 923.3 TFLOP."""
    for unit, size in (("MFLOP", 1e6), ("GFLOP", 1e9)):
        if flops < 1000 * size:
            return f"{flops / size:.4g} {unit}"
    return f"{flops / 1e12:,.4g} TFLOP"


def layout(shape: tuple[int, ...], spec: Spec) -> str:
    """A shape and the axes that split it, such as 5x5x128(fsdp)x704x2816."""
    return "x".join(
        str(size) if axis is None else f"{size}({axis})"
        for size, axis in zip(shape, spec, strict=True)
    )


def format_bytes(size: float) -> str:
    """Such as 12 B, 3.52 kB, 1,024.00 GB; powers of ten."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:,.2f} GB"
