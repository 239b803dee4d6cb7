"""What a run tells while it runs: metrics.jsonl, TensorBoard, and a person at a terminal.

directory = create_run_directory(config)
with MetricsWriter(directory, config.log, num_steps=config.steps) as metrics:
    metrics.log(step, loss=..., grad_norm=..., tokens_per_s=..., step_time_s=..., ...)
"""

import json
import math
from collections import deque
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

if TYPE_CHECKING:
    from train.config import LogConfig, RunConfig

_SHOWN = (
    ("loss", "loss {:.3f}"),
    ("eval_loss", "held-out loss {:.3f}"),
    ("eval_bits_per_byte", "{:.3f} bits/byte"),
    ("tokens_per_s", "{:,.0f} tokens/s"),
    ("step_time_s", "{:.3f} s/step"),
    ("grad_norm", "grad norm {:.2f}"),
    ("expert_load_max", "expert load {:.1f}x"),
)
"""Metrics a person sees, in this order, where a row has them. All others are in the files."""


def create_run_directory(config: "RunConfig") -> Path:
    """Makes log.dir/name, or takes the one there if the run may go on from a checkpoint; any other
    run gets name-2, name-3, ... if that is taken: nothing is ever overwritten. Writes config.json
    into it. Raises ValueError where no folder can be made."""
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
    (directory / "config.json").write_text(config.to_json() + "\n")
    return directory


def expert_load_metrics(expert_load: np.ndarray) -> dict[str, float]:
    """Of `expert_load` [L, E], the tokens each expert received: its largest and smallest value
    over the layer's mean (the load of perfect balance), and how many experts received none."""
    share = expert_load / expert_load.mean(axis=1, keepdims=True)
    return {
        "expert_load_max": float(share.max()),
        "expert_load_min": float(share.min()),
        "dead_experts": int((expert_load == 0).sum()),
    }


class MetricsWriter:
    """Writes one JSON object a line into metrics.jsonl, each line whole as soon as it is logged,
    so that a killed run leaves a readable file; the same as TensorBoard scalars; and shows
    progress: a bar and the last row on a terminal, plain lines every `log.every` steps elsewhere;
    both keep a line for each evaluation and for the last step.
    """

    def __init__(
        self,
        directory: Path,
        log: "LogConfig",
        *,
        num_steps: int,
        done: int = 0,
        console: Console | None = None,
    ) -> None:
        """Goes on after step `done`: rows of later steps, which are trained again, are dropped.
        With 0, a file that is there is kept under another name."""
        self.console = console or Console()
        self._every = log.every
        self._num_steps = num_steps
        self._recent_step_times: deque[float] = deque(maxlen=20)
        path = directory / "metrics.jsonl"
        _drop_rows_after(done, path)
        self._file = open(path, "a", buffering=1)  # 1: by line
        self._tensorboard = None
        if log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(directory), purge_step=done + 1)
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
        if self._tensorboard:
            self._tensorboard.close()
        self._file.close()

    def log(self, step: int, **metrics: float) -> None:
        """One row, for step 1 ... num_steps. Values are numbers of the host; those that are not
        finite become null in the file, since JSON has no name for them."""
        row = {name: _finite(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        if self._tensorboard:
            for name, value in metrics.items():
                tag = f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
                self._tensorboard.add_scalar(tag, value, step)
        if "step_time_s" in metrics and step > 1:  # the first step compiles
            self._recent_step_times.append(metrics["step_time_s"])
        self._show(step, metrics)

    def print(self, text: str) -> None:
        """Text for a person, above the progress bar where there is one."""
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def _show(self, step: int, metrics: dict[str, float]) -> None:
        shown = [form.format(metrics[name]) for name, form in _SHOWN if name in metrics]
        line = "  ".join([f"step {step}/{self._num_steps}", *shown, f"eta {self._eta(step)}"])
        if self._live:
            bar = ProgressBar(total=self._num_steps, completed=step)
            self._live.update(Group(Text(line), bar))
        is_due = not self._live and (step == 1 or step % self._every == 0)
        if is_due or "eval_loss" in metrics or step == self._num_steps:
            self.print(line)

    def _eta(self, step: int) -> str:
        if not self._recent_step_times:
            return "?"
        # The median, so that a step that compiled does not count for the others.
        seconds = float(np.median(self._recent_step_times)) * (self._num_steps - step)
        return str(timedelta(seconds=round(seconds)))


def _drop_rows_after(done: int, path: Path) -> None:
    if not path.exists():
        return
    if done == 0:
        free = (path.with_name(f"metrics-{number}.jsonl") for number in count(1))
        path.rename(next(name for name in free if not name.exists()))
        return
    kept = path.with_suffix(".kept")
    with open(path) as rows, open(kept, "w") as file:
        # A killed process may have left half a row.
        file.writelines(
            row for row in rows if row.endswith("\n") and json.loads(row)["step"] <= done
        )
    kept.replace(path)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
