"""Reads the compiler's RESOURCE_EXHAUSTED: what did not fit, by how much, and the largest buffers.

The message is text for people, and its wording is the compiler's own (libtpu 0.0.21); a message
that cannot be read is shown as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOTALS = re.compile(
    r"Ran out of memory in memory space (\w+)\. Used ([\d.]+[KMGT]?B?) of ([\d.]+[KMGT]?B?)"
)
_ONE = re.compile(
    r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\).*?"
    r"shape = '([^']*)', space=(\w+),.*?tag = '([^']*)'"
)
"""Said instead when one buffer alone is too large."""
_SIZE = re.compile(r"([\d.]+)([KMGT]?)B?")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Allocation:
    """One buffer of the compiler's list."""

    bytes: int
    """With the padding of its tiles."""
    shape: str
    """As HLO writes it."""
    op_name: str
    """Where it comes from, as HLO's metadata say; "" where they say nothing."""
    label: str
    """The instruction, as HLO writes it."""


@dataclass(frozen=True)
class Exhausted:
    """A memory that was too small."""

    space: str
    """hbm, or vmem: what a kernel's tiles live in."""
    used_bytes: int
    """What the program takes, to the hundredth of the message's unit."""
    available_bytes: int
    """What there is."""
    allocations: tuple[Allocation, ...]
    """The largest, as the compiler lists them."""

    @property
    def excess_bytes(self) -> int:
        """By how much it does not fit."""
        return self.used_bytes - self.available_bytes


def parse_exhausted(message: str) -> Exhausted | None:
    """The message as data; None if it is not of the known form."""
    totals = _TOTALS.search(message)
    if totals is None:
        return _one_too_large(message)
    # Each entry of the list begins "  12. Size: 1.38G".
    entries = re.split(r"^\s+\d+\. (?=Size: )", message, flags=re.MULTILINE)[1:]
    return Exhausted(
        space=totals[1],
        used_bytes=_bytes(totals[2]),
        available_bytes=_bytes(totals[3]),
        allocations=tuple(map(_allocation, entries)),
    )


def _one_too_large(message: str) -> Exhausted | None:
    found = _ONE.search(message)
    if found is None:
        return None
    size, available, shape, space, tag = found.groups()
    allocation = Allocation(int(size), shape, op_name="", label=tag)
    return Exhausted(space, int(size), int(available), (allocation,))


def _allocation(entry: str) -> Allocation:
    op_name = re.search(r'op_name="([^"]*)"', entry)
    return Allocation(
        bytes=_bytes(_line(entry, "Size")),
        shape=_line(entry, "Shape"),
        op_name=op_name[1] if op_name else "",
        label=_line(entry, "XLA label"),
    )


def _line(entry: str, key: str) -> str:
    found = re.search(rf"^\s*{key}: (.*)$", entry, re.MULTILINE)
    return found[1].strip() if found else ""


def _bytes(text: str) -> int:
    """Such as 35.70G, 968.00M or 0B; powers of 1024."""
    number, unit = _SIZE.match(text).groups()
    return round(float(number) * 1024 ** _POWERS[unit])
