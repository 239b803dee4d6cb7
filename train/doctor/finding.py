"""What one check found, and how a list of them looks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

_STYLES = {"ok": "green", "failed": "bold red", "not run": "dim"}


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    check: str
    """What was looked at."""
    state: Literal["ok", "failed", "not run"]
    """How it came out. What depends on a failed check is not run."""
    result: str
    """What was seen."""
    cure: str = ""
    """What to do about it: of every failed check, and of no other."""

    def __post_init__(self) -> None:
        if (self.state == "failed") != bool(self.cure):
            raise ValueError(
                f"cure = {self.cure!r} of a check that is {self.state!r}: give what failed a cure, "
                "and nothing else"
            )

    def to_json(self) -> str:
        """One line, which `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Finding:
        """The finding of a line that `to_json` wrote."""
        return cls(**json.loads(line))


def skipped(checks: Iterable[str], reason: str) -> list[Finding]:
    """Findings of checks that were not run."""
    return [Finding(check, "not run", reason) for check in checks]


def findings_table(findings: Sequence[Finding]) -> Table:
    """A row a check, and under each failed one its cure; at most 80 columns."""
    table = Table(box=SIMPLE_HEAD, width=80, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("check", "", "result"):
        table.add_column(column, overflow="fold", no_wrap=column != "result")
    for finding in findings:
        style = _STYLES[finding.state]
        # As Text: rich would take brackets for markup.
        table.add_row(finding.check, Text(finding.state, style), Text(finding.result))
        if finding.cure:
            table.add_row("", Text("cure", "bold"), Text(finding.cure, "bold"))
    return table
