"""A report as tables of text, from the JSON that it is kept as: for a terminal and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.tables import format_bytes, format_flops, text_table

if TYPE_CHECKING:
    from rich.table import Table

_NEEDED = ("preset", "topology", "fits", "memory", "collectives", "time_by_kind", "unknowns")


@dataclass(frozen=True)
class View:
    """One table."""

    title: str
    """Above it."""
    columns: tuple[str, ...]
    """The first names rows, the others hold their values."""
    rows: tuple[tuple[str, ...], ...]
    """As many cells as columns each."""

    def rich(self) -> Table:
        """For a terminal."""
        return text_table(self.title, self.columns, self.rows)

    def markdown(self) -> str:
        """For a file: a heading and a table, or a list where there is only one column."""
        if len(self.columns) == 1:
            lines = [f"- {_escape(row[0])}" for row in self.rows]
        else:
            rule = "|---|" + "---:|" * (len(self.columns) - 1)
            lines = [_row(self.columns), rule, *map(_row, self.rows)]
        return "\n".join([f"## {self.title}", "", *lines, ""])


def read_report(path: str) -> dict[str, Any]:
    """A report.json. Raises ValueError if `path` is not one."""
    remedy = "give a report.json that python -m train compile wrote"
    try:
        report = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"report = {path!r}: {error.strerror}; {remedy}") from None
    except ValueError:
        raise ValueError(f"report = {path!r}: not JSON; {remedy}") from None
    missing = [key for key in _NEEDED if not isinstance(report, dict) or key not in report]
    if missing:
        raise ValueError(f"report = {path!r}: has no {', '.join(missing)}; {remedy}")
    return report


def report_views(report: Mapping[str, Any]) -> list[View]:
    """Every table of a report that has rows."""
    verdict = "fits" if report["fits"] else "DOES NOT FIT"
    title = f"{report['preset']} on {report['topology']}: {verdict}"
    views = [
        View(title, ("HBM", "a chip"), _pairs(report["memory"])),
        View(
            "Recomputation, a chip and step",
            ("", ""),
            _recomputation(report),
        ),
        View(
            "Largest buffers when most is in use, by parameter or what writes them",
            ("", "shape", "how many", "bytes of one"),
            tuple(
                (b["name"], b["shape"], f"{b['count']:,}", format_bytes(b["bytes"]))
                for b in report.get("largest_buffers", ())
            ),
        ),
        View(
            "What would help (savings a chip, estimated)",
            ("", "saves about", "namely"),
            tuple(
                (r["options"], format_bytes(r["saved_bytes"]), r["because"])
                for r in report.get("remedies", ())
            ),
        ),
        View(
            "Collectives of a step (link ms: at the published rate, a lower bound)",
            ("", "executed", "bytes", "asynchronous", "link ms"),
            tuple(
                (
                    c["kind"],
                    f"{c['count']:,}",
                    format_bytes(c["bytes"]),
                    f"{c['num_asynchronous']:,}",
                    milliseconds(c.get("link_s")),
                )
                for c in report["collectives"]
            ),
        ),
        View(
            "Modelled time of a step (not measured); the compiler's own beside, not summed",
            ("", "executed", "HBM bytes", "ms", "compiler ms"),
            _times(report),
        ),
        View(
            _kernels_title(report.get("routing")),
            ("", "results", "executed", "ms", ""),
            tuple(
                (
                    k["name"],
                    k["shapes"],
                    f"{k['count']:,}",
                    milliseconds(k["modelled_s"]),
                    k["source"],
                )
                for k in report.get("kernels", ())
            ),
        ),
        View(
            "Not known, or not in the modelled step",
            ("",),
            tuple((unknown,) for unknown in report["unknowns"]),
        ),
        View(
            "Compiler flags",
            ("", "value", "why"),
            tuple((f["name"], f["value"], f["reason"]) for f in report.get("flags", ())),
        ),
    ]
    return [view for view in views if view.rows]


def _kernels_title(routing: str | None) -> str:
    title = "Kernels, in the kinds above"
    return title if routing is None else f"{title}; random routing: {routing}"


def milliseconds(seconds: float | None) -> str:
    """Such as 1,234.5, 0.012 (below 10 to the microsecond) or unknown."""
    if seconds is None:
        return "unknown"
    return f"{1e3 * seconds:,.1f}" if seconds >= 0.01 else f"{1e3 * seconds:.3f}"


def _times(report: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    if not report["time_by_kind"]:
        return ()
    kinds = (
        (
            k["kind"],
            f"{k['count']:,}",
            format_bytes(k["bytes"]),
            milliseconds(k["modelled_s"]),
            milliseconds(k.get("compiler_s")),
        )
        for k in report["time_by_kind"]
    )
    sums = [("modelled step", "", "", milliseconds(report["modelled_step_s"]), "")]
    if report.get("modelled_mfu") is not None:
        rate = f"{report['modelled_tokens_per_s']:,.0f} tokens/s a chip"
        sums.append((f"as {rate}, MFU {report['modelled_mfu']:.1%}", "", "", "", ""))
    return (*kinds, *sums)


def _recomputation(report: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    if "recompute" not in report:
        return ()
    cost = report["recompute"]
    share = f"{cost['flops'] / cost['counted_flops']:.1%} of those counted"
    where = " on the host" if cost.get("kept_on_host") else ""
    kept = format_bytes(cost["kept_bytes"]) + where
    rows = [
        ("policy", cost["policy"]),
        ("kept by layers for the backward pass, by arithmetic", kept),
        ("FLOPs run again, by arithmetic", f"{format_flops(cost['flops'])}, {share}"),
    ]
    if report.get("rerun_s"):
        name = "modelled ms of layers run again, in the step below"
        rows.append((name, milliseconds(report["rerun_s"])))
    return tuple(rows)


def _pairs(sizes: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    return tuple((name, format_bytes(size)) for name, size in sizes.items())


def markdown_document(title: str, views: Iterable[View], pictures: Sequence[str] = ()) -> str:
    """A Markdown file of views, pictures (file names beside it) first."""
    images = [f"![{Path(name).stem.replace('_', ' ')}]({name})" for name in pictures]
    blocks = [f"# {title}", *images, *(view.markdown().rstrip() for view in views)]
    return "\n\n".join(blocks) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_escape, cells)) + " |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
