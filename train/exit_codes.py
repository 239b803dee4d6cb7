"""How a run ends, as a number for whoever starts it again and as a last line for whoever reads.

A wrapper script restarts on PREEMPTED; everything else wants a person first. Numbers follow
sysexits.h where it has one that fits.
"""

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Status of `python -m train`."""

    FINISHED = 0
    """All steps done, now or before."""
    DEFECT = 1
    """An error nobody foresaw: the traceback tells."""
    USER_ERROR = 2
    """Input that cannot be used; nothing was trained."""
    DATA_ERROR = 65
    """The training data failed while the run went on."""
    STORAGE_ERROR = 74
    """A checkpoint could not be written, or none of those there can be read."""
    PREEMPTED = 75
    """SIGTERM: the step in progress was finished and saved. The same command goes on."""
    DIVERGED = 80
    """Too many updates in a row were skipped for their gradient."""
    OUT_OF_MEMORY = 81
    """A device or the compiler ran out of memory."""
    HANG = 82
    """No step ended for too long."""
    INTERRUPTED = 130
    """Ctrl-C."""


class RunEnded(Exception):
    """The run ends before its last step, for a known reason; the message is its closing line."""

    exit_code: ClassVar[ExitCode]

    def __init__(self, closing_line: str, details: str = "") -> None:
        """`details` are for the lines above it."""
        super().__init__(closing_line)
        self.details = details


class DataFailure(RunEnded):
    exit_code = ExitCode.DATA_ERROR


class StorageFailure(RunEnded):
    exit_code = ExitCode.STORAGE_ERROR


class Preempted(RunEnded):
    exit_code = ExitCode.PREEMPTED


class Diverged(RunEnded):
    exit_code = ExitCode.DIVERGED


class OutOfMemory(RunEnded):
    exit_code = ExitCode.OUT_OF_MEMORY
