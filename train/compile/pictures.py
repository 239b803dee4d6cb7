"""Pictures of a report: a chip's memory, and the modelled time of a step by kind of work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from train.compile.views import milliseconds
from train.tables import format_bytes

_GIB = 1 << 30
_FREE_SHOWN = 0.8
"""Share of a chip's memory up to which what is free has a bar; more would dwarf the others."""
_NUM_KINDS = 15
"""Bars of the time's picture; what is smaller is drawn as one."""


def draw_report(report: Mapping[str, Any], folder: Path) -> list[str]:
    """Writes memory.png, and time_by_kind.png if anything is modelled; returns the files' names."""
    pictures = {"memory.png": _memory(report)}
    if any(kind["modelled_s"] for kind in report["time_by_kind"]):
        pictures["time_by_kind.png"] = _time(report)
    for name, figure in pictures.items():
        figure.savefig(folder / name, dpi=120)
    return list(pictures)


def memory_parts(memory: Mapping[str, int]) -> dict[str, int]:
    """Bytes that add up to the peak: outputs that replace state take none of their own. A step that
    does not fit has no parts."""
    if "argument" not in memory:
        return {"all of it": memory["peak"]}
    return {
        "state and batch": memory["argument"],
        "results that replace nothing": memory["output"] - memory["alias"],
        "temporaries": memory["temp"],
        "program": memory["code"],
    }


def time_parts(report: Mapping[str, Any]) -> dict[str, float]:
    """Modelled seconds by kind, largest first, small ones together."""
    known = [(k["kind"], k["modelled_s"]) for k in report["time_by_kind"] if k["modelled_s"]]
    known.sort(key=lambda part: -part[1])
    parts = dict(known[:_NUM_KINDS])
    if rest := sum(seconds for _, seconds in known[_NUM_KINDS:]):
        parts["the rest"] = rest
    return parts


def _memory(report: Mapping[str, Any]) -> Figure:
    memory = report["memory"]
    parts = memory_parts(memory)
    free = memory["available"] - memory["peak"]
    if 0 < free < _FREE_SHOWN * memory["available"]:
        parts["free"] = free
    figure = Figure(figsize=(9, 1.2 + 0.4 * len(parts)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(list(parts), [size / _GIB for size in parts.values()])
    axes.bar_label(bars, [format_bytes(size) for size in parts.values()], padding=2)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("GiB of HBM on a chip (the compiler's figures)")
    sizes = f"{format_bytes(memory['peak'])} of {format_bytes(memory['available'])}"
    axes.set_title(f"{report['preset']} on {report['topology']}: {sizes}")
    return figure


def _time(report: Mapping[str, Any]) -> Figure:
    parts = time_parts(report)
    figure = Figure(figsize=(9, 1 + 0.35 * len(parts)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(list(parts), [1e3 * seconds for seconds in parts.values()])
    axes.bar_label(
        bars,
        labels=[milliseconds(seconds) for seconds in parts.values()],
        padding=2,
        fontsize="small",
    )
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("modelled ms of a step (not measured)")
    total = milliseconds(report["modelled_step_s"])
    axes.set_title(f"{report['preset']} on {report['topology']}: {total} ms modelled")
    return figure
