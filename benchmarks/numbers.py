"""Every kept figure on one page, from benchmarks/results.

python -m benchmarks.numbers > docs/numbers.md
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from train.compile.views import View, report_views
from train.tables import format_bytes

RESULTS = Path(__file__).parent / "results"
_INTRO = """# Numbers

Written by `python -m benchmarks.numbers > docs/numbers.md` from the files in
[benchmarks/results](../benchmarks/results), which each benchmark's command writes anew.

*Modelled* figures come from libtpu's compile-only client, for one v6e chip of a 26B run on v6e-128
(2 x 16,384 tokens): a kernel's time from its static schedule, a fusion's from its bytes. They
compare programs; nobody has measured them. How far off the model may be: *The model beside
published times*. *Measured* figures ran on the CPU that is named.
"""


def page(results: Path = RESULTS) -> str:
    """The page as Markdown."""
    blocks = [_INTRO]
    for name, section in _SECTIONS.items():
        blocks.append(section(json.loads((results / name).read_text()), name))
    others = sorted(path.name for path in results.glob("*.json") if path.name not in _SECTIONS)
    if others:
        rows = tuple((f"[{name}](../benchmarks/results/{name})",) for name in others)
        blocks.append(View("Other results", ("file",), rows).markdown())
    return "\n".join(blocks)


def _step(report: dict[str, Any], name: str) -> str:
    wanted = ("on v6e-128", "Collectives", "Modelled time")
    views = [view for view in report_views(report) if any(word in view.title for word in wanted)]
    command = f"python -m train compile --preset {report['preset']} --topology {report['topology']}"
    waits = f"{report['exposed_collectives_s']:.2f} s of waits for collectives are not in it."
    head = f"## The step of the 26B, modelled\n\n{_source(report, name, command)}\n\n{waits}\n"
    return "\n".join([head, *(view.markdown().replace("## ", "### ", 1) for view in views)])


def _products(rows: Sequence[dict[str, Any]], name: str) -> str:
    known = [row for row in rows if "est_us" in row]
    table = _table(
        "Grouped products, modelled",
        ("product", "kernel", "routing", "ms", "TFLOP/s", "of peak"),
        (
            (
                *(row["product"], f"{row['kind']}, {' '.join(row['tiles'][:1])}", row["routing"]),
                *(_ms(row["est_us"]), f"{row['useful_tflops']:.0f}", f"{row['frac_peak']:.0%}"),
            )
            for row in known
        ),
    )
    return _with_source(table, known[-1], name, "python -m benchmarks.gmm")


def _calibration(rows: Sequence[dict[str, Any]], name: str) -> str:
    known = [row for row in rows if row["published_us"]]
    table = _table(
        "The model beside published times",
        ("kernel", "shape", "routing", "modelled ms", "published ms", "ratio"),
        (
            (
                *(row["op"], row["shape"], row["routing"], _ms(row["est_us"])),
                *(_ms(row["published_us"]), f"{row['est_us'] / row['published_us']:.2f}"),
            )
            for row in known
        ),
    )
    command = "python -m benchmarks.kernel_profile --op all --calibrate --routing all"
    return _with_source(table, known[-1], name, command)


def _rows(found: dict[str, Any], name: str) -> str:
    table = _table(
        "Rows to experts and back, modelled",
        ("program", "routing", "ms", "over its memory bound", "trusted"),
        (
            (
                *(row["program"], row.get("routing", ""), _ms(_time_of(row))),
                f"{row['over_memory_bound']:.2f}" if "over_memory_bound" in row else "",
                "yes" if row["trusted"] else f"no: no model of {', '.join(row['data_dependent'])}",
            )
            for row in found["rows"]
            if "modelled_us" in row
        ),
    )
    return _with_source(table, found, name, "python -m benchmarks.combine")


def _time_of(row: dict[str, Any]) -> float:
    """Microseconds by the static schedule where there is one: small fusions are no matter of
    bytes."""
    return row.get("static_us", row["modelled_us"])


def _attention(found: dict[str, Any], name: str) -> str:
    table = _table(
        "All attention of a step, everything recomputed, modelled",
        ("kernels", "s"),
        ((name, f"{seconds:.3f}") for name, seconds in found["step_s"].items()),
    )
    return _with_source(table, found["rows"][-1], name, "python -m benchmarks.attention")


def _cpu(found: dict[str, Any], name: str) -> str:
    table = _table(
        f"One MoE branch on a CPU ({found['cpu']}, one thread), measured",
        ("", "median s", "best s", "of grouped_mm"),
        (
            (kind, *(f"{row[key]:.2f}" for key in ("median_s", "best_s", "ratio_to_grouped_mm")))
            for kind, row in found["results"].items()
        ),
    )
    return _with_source(table, found, name, "python -m benchmarks.cpu_moe")


def _layouts(rows: Sequence[dict[str, Any]], name: str) -> str:
    table = _table(
        "When expert weights are gathered",
        ("weights", "gathers waited for", "HBM at the peak"),
        (
            (row["weights"], *(format_bytes(row[k]) for k in ("waited_gather_bytes", "peak_bytes")))
            for row in rows
        ),
    )
    return _with_source(table, rows[-1], name, "python -m benchmarks.expert_layouts")


def _orientations(rows: Sequence[dict[str, Any]], name: str) -> str:
    table = _table(
        "Which way expert weights lie",
        ("weights", "HBM of temporaries", "large relayouts"),
        (
            (row["weights"], format_bytes(row["temp_bytes"]), "; ".join(row["relayouts"]) or "none")
            for row in rows
        ),
    )
    return _with_source(table, rows[-1], name, "python -m benchmarks.orientation")


_SECTIONS: dict[str, Callable[[Any, str], str]] = {
    "gemma4_26b_a4b_v6e-128.json": _step,
    "gmm_v6e.json": _products,
    "expert_layouts_v6e-128.json": _layouts,
    "orientation_v6e.json": _orientations,
    "combine_v6e.json": _rows,
    "attention_v6e.json": _attention,
    "kernel_profile_v6e.json": _calibration,
    "cpu_moe.json": _cpu,
}


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> View:
    return View(title, columns, tuple(rows))


def _with_source(view: View, found: dict[str, Any], name: str, command: str) -> str:
    heading, rest = view.markdown().split("\n\n", 1)
    return f"{heading}\n\n{_source(found, name, command)}\n\n{rest}"


def _source(found: dict[str, Any], name: str, command: str) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    commit = f", commit {found['commit']}" if found.get("commit") else ""
    link = f"[{name}](../benchmarks/results/{name})"
    return f"`{command}`: {link}, {found['date'][:10]}{commit}, {versions}."


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f}"


if __name__ == "__main__":
    print(page(), end="")
