"""Two reports side by side, with what changed from the first to the second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from train.compile.views import View, milliseconds
from train.tables import format_bytes

_ABSENT = "-"


def compare_views(
    before: Mapping[str, Any], after: Mapping[str, Any], names: tuple[str, str]
) -> list[View]:
    """Tables of memory, collectives, modelled time and what else differs.

    Args:
        before, after: as `train.compile.views.read_report` returns them.
        names: headings of the two.
    """
    both = (before, after)
    heading = (*names, "difference")
    collectives = [{c["kind"]: c for c in report["collectives"]} for report in both]
    times = [{k["kind"]: k["modelled_s"] for k in report["time_by_kind"]} for report in both]
    for report, kinds in zip(both, times, strict=True):
        kinds["modelled step"] = report.get("modelled_step_s")
    views = [
        View("What differs", ("", *names), _facts(before, after)),
        View(
            "HBM a chip",
            ("", *heading),
            _rows(before["memory"], after["memory"], format_bytes),
        ),
        View(
            "Collectives of a step: bytes",
            ("", *heading),
            _rows(
                *({k: c["bytes"] for k, c in kinds.items()} for kinds in collectives), format_bytes
            ),
        ),
        View(
            "Collectives of a step: executions",
            ("", *heading),
            _rows(*({k: c["count"] for k, c in kinds.items()} for kinds in collectives), _count),
        ),
        View("Modelled ms of a step (not measured)", ("", *heading), _rows(*times, milliseconds)),
    ]
    return [view for view in views if view.rows]


def _facts(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """What the two are: shown where they differ, options of the configuration too."""
    sides = [
        {
            **{key: report.get(key) for key in ("preset", "topology", "fits", "commit")},
            **report.get("versions", {}),
            **{f["name"]: f["value"] for f in report.get("flags", ())},
            **_flat(report.get("config", {})),
        }
        for report in (before, after)
    ]
    first, second = sides
    return tuple(
        (key, _text(first.get(key)), _text(second.get(key)))
        for key in dict.fromkeys([*first, *second])
        if first.get(key) != second.get(key)
    )


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by their dotted names."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _rows(
    before: Mapping[str, float | None],
    after: Mapping[str, float | None],
    form: Callable[[float], str],
) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (key, _cell(before, key, form), _cell(after, key, form), _change(before, after, key, form))
        for key in dict.fromkeys([*before, *after])
    )


def _cell(values: Mapping[str, float | None], key: str, form: Callable[[float], str]) -> str:
    if key not in values:
        return _ABSENT
    return "unknown" if values[key] is None else form(values[key])


def _change(
    before: Mapping[str, float | None],
    after: Mapping[str, float | None],
    key: str,
    form: Callable[[float], str],
) -> str:
    """Such as +1.2 GB (+30.0 %). What one side lacks counts as 0, what it does not know is no
    number."""
    first, second = before.get(key, 0), after.get(key, 0)
    if first is None or second is None:
        return "unknown"
    if first == second:
        return "same"
    sign = "+" if second > first else "-"
    share = f" ({100 * (second / first - 1):+.1f} %)" if first else ""
    return f"{sign}{form(abs(second - first))}{share}"


def _count(value: float) -> str:
    return f"{value:,}"


def _text(value: Any) -> str:
    return _ABSENT if value is None else str(value)
