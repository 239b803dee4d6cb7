"""Pictures of a report: a chip's memory, and the modelled time of a step by kind of work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_GIB = 1 << 30
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
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.add_subplot()
    left = 0.0
    for name, size in memory_parts(report["memory"]).items():
        axes.barh([""], [size / _GIB], left=left, label=f"{name}: {size / _GIB:,.2f}")
        left += size / _GIB
    available = report["memory"]["available"] / _GIB
    axes.axvline(available, color="black", linestyle="--", label=f"a chip has {available:,.2f}")
    axes.set_xlim(0, 1.05 * max(left, available))
    axes.set_xlabel("GiB of HBM on a chip (the compiler's figures)")
    axes.set_title(f"{report['preset']} on {report['topology']}")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return figure


def _time(report: Mapping[str, Any]) -> Figure:
    parts = time_parts(report)
    figure = Figure(figsize=(9, 1 + 0.35 * len(parts)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(list(parts), [1e3 * seconds for seconds in parts.values()])
    axes.bar_label(bars, fmt="%.1f", padding=2, fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("modelled ms of a step (not measured)")
    total = 1e3 * report["modelled_step_s"]
    axes.set_title(f"{report['preset']} on {report['topology']}: {total:,.1f} ms modelled")
    return figure
