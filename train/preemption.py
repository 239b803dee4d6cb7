"""SIGTERM: the machine goes away soon."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self


class PreemptionNotice:
    """Takes SIGTERM as a wish to stop after the step in progress. A second one ends the process as
    SIGTERM always did. Use it as a context, in the main thread."""

    def __init__(self) -> None:
        self.is_given = False
        self._before: object = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # None: a handler that was not installed from Python, which Python cannot put back.
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_given = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
