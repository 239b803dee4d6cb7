"""`python -m train doctor`: all checks in order, and one table."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rich.console import Console

from train.doctor import devices, mosaic
from train.doctor.children import run_checks
from train.doctor.finding import Finding, findings_table
from train.doctor.folders import check_checkpoint_folder, check_log_folder
from train.doctor.versions import check_versions
from train.exit_codes import ExitCode

if TYPE_CHECKING:
    from train.config import RunConfig


def examine(config: RunConfig, minutes: float, console: Console | None = None) -> ExitCode:
    """Prints what each check found of the machine as `config` would use it: FINISHED if none
    failed, else USER_ERROR. Raises ValueError for no time at all."""
    if minutes <= 0:
        raise ValueError(f"minutes = {minutes}: give the checks some time, such as 5")
    console = console or Console()
    findings = [
        check_versions(needs_libtpu=config.mesh.platform == "tpu"),
        check_log_folder(config),
        check_checkpoint_folder(config),
    ]
    with console.status("compiling a kernel, then training two steps of a tiny model"):
        findings.append(_check_compiler(60 * minutes))
        mesh = json.dumps(asdict(config.mesh))
        findings += run_checks("train.doctor.devices", [mesh], devices.CHECKS, 60 * minutes)
    console.print(findings_table(findings))
    failed = [finding.check for finding in findings if finding.state == "failed"]
    if failed:
        console.print(f"not ready: {', '.join(failed)} failed", highlight=False)
        return ExitCode.USER_ERROR
    where = "TPU chips" if config.mesh.platform == "tpu" else "CPU"
    console.print(f"ready to train on {config.mesh.num_devices} device(s) ({where})")
    return ExitCode.FINISHED


def _check_compiler(seconds: float) -> Finding:
    if find_spec("libtpu") is None:
        return Finding(mosaic.CHECK, "not run", "no libtpu here (pip install -e '.[aot]')")
    (finding,) = run_checks("train.doctor.mosaic", [], (mosaic.CHECK,), seconds)
    return finding
