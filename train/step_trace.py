"""Traces of some steps of a run: what host and devices did, for xprof and Perfetto."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch_xla
import torch_xla.debug.profiler as xp

if TYPE_CHECKING:
    from train.config import ProfileConfig


class StepTrace:
    """Traces steps `profile.first` to `profile.last` of a run into a folder; without them, nothing.

    A trace begins where the devices are idle and ends where the last of its steps is done, so the
    loop waits at `is_edge`; all other steps run as they would. Steps are named on the timeline by
    the profiler's own marks and not by torch_xla's StepTrace, whose scope becomes part of the graph
    and would have it compiled anew.
    """

    def __init__(self, config: ProfileConfig, folder: Path, say: Callable[[str], None]) -> None:
        """`say` prints a line."""
        self._config, self._folder, self._say = config, folder, say
        self._begun: int | None = None
        self._seen = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """What an ending run has of its trace is kept."""
        self._write()

    def is_edge(self, step: int) -> bool:
        """Whether the devices have to be done with `step` before the next one: a trace begins or
        ends between them."""
        return bool(self._config.first) and step in (self._config.first - 1, self._config.last)

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Around all that the host does for `step`. Begins the trace, of a run that goes on from a
        checkpoint within it, too."""
        if self._config.first <= step <= self._config.last and self._begun is None:
            xp.start_trace(str(self._folder))
            self._begun = step
        self._seen = step
        with torch_xla._XLAC.profiler.TraceMe("train_step", step_num=step, _r=1):
            yield

    def done(self, step: int) -> None:
        """The devices are done with `step`."""
        if step == self._config.last:
            self._write()

    def _write(self) -> None:
        if self._begun is None:
            return
        xp.stop_trace()
        self._say(
            f"trace of steps {self._begun} to {self._seen} in {self._folder}: pip install xprof, "
            f"then xprof --logdir {self._folder}; or open its *.trace.json.gz in ui.perfetto.dev"
        )
        self._begun = None
