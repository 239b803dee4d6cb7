"""Ends a run that makes no progress: a lost host leaves the others waiting for ever, and a pod that
waits costs as much as one that trains."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from types import TracebackType
from typing import Self

from train.exit_codes import ExitCode


class Watchdog:
    """A thread that ends the process with `ExitCode.HANG` when `beat` was not called for `minutes`;
    0: never. First it prints where every thread is. Use it as a context."""

    def __init__(self, minutes: float) -> None:
        self._seconds = 60 * minutes
        self._last, self._after = time.monotonic(), "the start"
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        self._last = time.monotonic()
        if self._seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()

    def beat(self, after: str) -> None:
        """Something was done: `after` names it."""
        self._last, self._after = time.monotonic(), after

    def _watch(self) -> None:
        while not self._stop.wait(min(self._seconds / 4, 10)):
            if time.monotonic() - self._last > self._seconds:
                # Not sys.exit: the main thread waits inside a library and would not hear of it.
                faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
                print(
                    f"hang: nothing was done for {self._seconds / 60:g} minutes after "
                    f"{self._after} (--hang_minutes); where each thread waits is printed above. "
                    "The same command goes on from the last checkpoint",
                    file=sys.__stderr__,
                    flush=True,
                )
                os._exit(ExitCode.HANG)
