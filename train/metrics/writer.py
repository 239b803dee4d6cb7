"""A run's folder, what goes into it, and what a person at a terminal sees."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from train.metrics.experts import heat_map
from train.metrics.sinks import check_sinks, open_sinks

if TYPE_CHECKING:
    from train.config import LogConfig, RunConfig

_SHOWN: tuple[tuple[str, Callable[[dict[str, float]], str]], ...] = (
    ("loss", "loss {loss:.3f}".format_map),
    ("eval_loss", "held-out loss {eval_loss:.3f}".format_map),
    ("eval_bits_per_byte", "{eval_bits_per_byte:.3f} bits/byte".format_map),
    ("tokens_per_s", "{tokens_per_s:,.0f} tokens/s".format_map),
    ("step_time_s", "{step_time_s:.3f} s/step".format_map),
    ("mfu", "MFU {mfu:.1%}".format_map),
    ("grad_norm", "grad norm {grad_norm:.2f}".format_map),
    ("expert_load_max", "experts {expert_load_min:.1f} to {expert_load_max:.1f}".format_map),
    ("dead_experts", lambda row: row["dead_experts"] and "{dead_experts} dead".format_map(row)),
    ("data_wait_s", lambda row: _waiting(row)),
)
"""Metrics a person sees, in this order, where a row has them; what comes out empty is left out. All
others are in the files."""


def create_run_directory(config: RunConfig) -> Path:
    """Makes log.dir/name, or takes the one there if the run may go on from a checkpoint; any other
    run gets name-2, name-3, ... if that is taken: nothing is ever overwritten. Raises ValueError
    where no folder can be made, and for a sink whose package is not installed."""
    check_sinks(config.log)
    root = Path(config.log.dir)
    may_go_on = config.resume != "never" and config.checkpoint.is_on
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            directory = root / (config.name if number == 1 else f"{config.name}-{number}")
            try:
                directory.mkdir(exist_ok=may_go_on)
                break
            except FileExistsError:
                continue
    except OSError as error:
        raise ValueError(
            f"log.dir = {config.log.dir!r}: no folder can be made there ({error.strerror}). "
            "Give a place to write to"
        ) from error
    return directory


class MetricsWriter:
    """Passes everything on to the sinks, and shows progress: a bar and the last row on a terminal,
    plain lines every `log.every` steps elsewhere; both keep a line for each evaluation and for the
    last step.
    """

    def __init__(
        self,
        directory: Path,
        log: LogConfig,
        *,
        num_steps: int,
        done: int = 0,
        console: Console | None = None,
    ) -> None:
        """Goes on after step `done`: rows of later steps, which are trained again, are dropped.
        With 0, a file that is there is kept under another name."""
        self.console = console or Console()
        self._log, self._num_steps = log, num_steps
        self._recent_step_times: deque[float] = deque(maxlen=20)
        self._sinks = open_sinks(directory, log, done)
        self._live = (
            Live(console=self.console, transient=True) if self.console.is_terminal else None
        )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()
        for sink in self._sinks:
            sink.close()

    def log(self, step: int, **metrics: float) -> None:
        """One row, for step 1 ... num_steps. Values are numbers of the host."""
        for sink in self._sinks:
            sink.scalars(step, metrics)
        if "step_time_s" in metrics and step > 1:  # the first step compiles
            self._recent_step_times.append(metrics["step_time_s"])
        self._show(step, metrics)

    def expert_load(self, step: int, expert_load: np.ndarray) -> None:
        """Draws `expert_load` [L, E] every `log.heat_map_every` steps and at the last one."""
        every = self._log.heat_map_every
        if every and (step % every == 0 or step == self._num_steps):
            pixels = heat_map(expert_load, step)
            for sink in self._sinks:
                sink.picture(step, "expert_load", pixels)

    def sample(self, step: int, text: str) -> None:
        """Text that the model wrote, printed and kept."""
        self.print("sample:\n" + text)
        for sink in self._sinks:
            sink.text(step, "sample", text)

    def print(self, text: str) -> None:
        """Text for a person, above the progress bar where there is one."""
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def _show(self, step: int, metrics: dict[str, float]) -> None:
        shown = [form(metrics) for name, form in _SHOWN if name in metrics]
        parts = [f"step {step}/{self._num_steps}", *filter(None, shown), f"eta {self._eta(step)}"]
        line = "  ".join(parts)
        if self._live:
            bar = ProgressBar(total=self._num_steps, completed=step)
            self._live.update(Group(Text(line), bar))
        is_due = not self._live and (step == 1 or step % self._log.every == 0)
        if is_due or "eval_loss" in metrics or step == self._num_steps:
            self.print(line)

    def _eta(self, step: int) -> str:
        if not self._recent_step_times:
            return "?"
        # The median, so that a step that compiled does not count for the others.
        seconds = float(np.median(self._recent_step_times)) * (self._num_steps - step)
        return str(timedelta(seconds=round(seconds)))


def _waiting(row: dict[str, float]) -> str:
    """Said once it is a twentieth of the step."""
    share = row["data_wait_s"] / row.get("step_time_s", math.inf)
    return f"waiting for data {share:.0%}" if share >= 0.05 else ""
