"""Reads the compiler's buffer assignment: what HBM a program takes, and what lives at its peak.

`get_compiled_memory_stats` adds up memories other than HBM and calls the sum temporaries; the
assignment, which the compiler writes beside its program when asked for a dump, tells them apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from train.compile.hlo import OTHER_SPACE

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*):$", re.MULTILINE)
_PARAMETER = re.compile(r"\bparameter (\d+)\b")
_PEAK = re.compile(r"^\s*Live ranges at \d+ \(peak\):\n((?:\s+\S+: \d+ bytes .*\n)*)", re.MULTILINE)
_LIVE = re.compile(r"^\s+(\S+)\{([\d,]*)\}: (\d+) bytes", re.MULTILINE)
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})? @\d+>(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class LiveBuffer:
    """A temporary that is alive when memory use is highest."""

    instruction: str
    """What writes it."""
    index: tuple[int, ...]
    """Which part of its result, where that is a tuple."""
    bytes: int
    """With the padding of its tiles."""


@dataclass(frozen=True)
class Assignment:
    """HBM of a program on one chip, in bytes."""

    argument_bytes: int
    """State and batch."""
    output_bytes: int
    """Results that have no argument's buffer."""
    temp_bytes: int
    """One region in which all temporaries are placed."""
    constant_bytes: int
    """Arrays that are part of the program."""
    parameters: dict[int, int]
    """Bytes of each argument, by its number."""
    peak: tuple[LiveBuffer, ...]
    """Temporaries alive at the peak, largest first."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        parts = (self.argument_bytes, self.output_bytes, self.temp_bytes, self.constant_bytes)
        return sum(parts)


def parse_assignment(text: str) -> Assignment:
    """The text of a `*buffer-assignment.txt`. Raises ValueError if it is not one."""
    sizes = {"argument": 0, "output": 0, "temp": 0, "constant": 0}
    parameters: dict[int, int] = {}
    found = _ALLOCATION.findall(text)
    if not found:
        raise ValueError("no allocation in this text: give a buffer assignment")
    for size, description in found:
        # Colours are memories other than HBM; thread-local buffers lie in an allocation of theirs.
        if re.search(r"\bcolor [1-9]", description) or "thread-local" in description:
            continue
        parameter = _PARAMETER.search(description)
        if parameter:
            parameters[int(parameter[1])] = int(size)
        sizes[_kind(description, parameter is not None)] += int(size)
    # The list of live buffers is of all memories.
    values = _VALUE.findall(text)
    elsewhere = {value[:2] for value in values if OTHER_SPACE.search(value[2])}
    peaks = [
        [entry for entry in _LIVE.findall(section) if entry[:2] not in elsewhere]
        for section in _PEAK.findall(text)
    ]
    live = max(peaks, key=lambda peak: sum(int(size) for *_, size in peak), default=[])
    return Assignment(
        **{f"{kind}_bytes": size for kind, size in sizes.items()},
        parameters=parameters,
        peak=tuple(
            LiveBuffer(name, tuple(int(i) for i in index.split(",") if i), int(size))
            for name, index, size in sorted(live, key=lambda entry: -int(entry[2]))
        ),
    )


def _kind(description: str, is_parameter: bool) -> str:
    if is_parameter:
        return "argument"
    if "preallocated-temp" in description:
        return "temp"
    return "constant" if "constant" in description else "output"
