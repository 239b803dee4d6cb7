"""Checks in a process of their own: one that crashes or hangs there is told like any other."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

from train.doctor.finding import Finding, skipped

_CURES = (
    (
        r"TPU is already in use by process with pid (\d+)",
        r"process \1 holds the chips: wait for it, or stop it (kill \1)",
    ),
    (
        r"Unsupported version: expected <= \d+",
        "libtpu and jax are not of one time: install the pinned set, pip install -e '.[tpu]'",
    ),
    (
        r"undefined symbol|GLIBC|No module named|cannot import name",
        "packages do not fit each other: install the pinned set into a new environment, "
        "pip install -e '.[tpu]'",
    ),
    (
        r"RESOURCE_EXHAUSTED",
        "the device's memory is taken: look for another process that uses it",
    ),
)
"""By what a process says when it fails."""
_UNKNOWN = "run it again; if it stays so, compare with the pinned set: pip install -e '.[tpu]'"


def run_checks(
    module: str, arguments: Sequence[str], checks: Sequence[str], seconds: float
) -> list[Finding]:
    """Findings of `python -m module arguments`, which prints them in the order of `checks`, each
    once it is known. One that is missing at the end, or after `seconds`, failed; those behind a
    failed one are not run."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        output, errors, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, errors, code = _text(late.stdout), _text(late.stderr), None
    findings = [Finding.from_json(line) for line in output.splitlines() if line.startswith("{")]
    rest = checks[len(findings) :]
    if rest and all(finding.state == "ok" for finding in findings):
        findings.append(_missing(rest[0], errors, code, seconds))
        rest = rest[1:]
    failed = next((f.check for f in findings if f.state == "failed"), None)
    return findings + skipped(rest, f"{failed} has to work first")


def print_findings(findings: Iterable[Finding]) -> None:
    """What the process of `run_checks` does: prints each as it comes, up to the first that
    failed."""
    for finding in findings:
        print(finding.to_json(), flush=True)
        if finding.state == "failed":
            return


def _missing(check: str, errors: str, code: int | None, seconds: float) -> Finding:
    if code is None:
        return Finding(
            *(check, "failed", f"no answer in {seconds / 60:g} minutes"),
            cure="on a slice of several hosts all have to run this at the same time, since each "
            "waits for the others: gcloud compute tpus tpu-vm ssh NAME --worker=all; else look "
            "for a process that holds the chips, or give more --minutes",
        )
    lines = [line for line in errors.splitlines() if line.strip()]
    said = lines[-1].strip() if lines else "nothing"
    for pattern, cure in _CURES:
        if found := re.search(pattern, errors):
            line = next(line for line in lines if found[0] in line)
            return Finding(check, "failed", line.strip(), found.expand(cure))
    return Finding(check, "failed", f"the process ended with {code}, saying: {said}", _UNKNOWN)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
