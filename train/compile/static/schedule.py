"""Reads the final schedule of one TPU kernel from the text that libtpu dumps.

    *-final_bundles.txt                                one VLIW bundle an entry, in program order
    *-final_hlo-static-per-bundle-utilization.txt      used issue slots, one row a bundle
    *-post-delay-converter.txt                         allocations, with space, size and offset

A bundle takes one cycle when nothing stalls. Loops and predicated code are found from branches: a
branch names a region, and the comments after bundles say where regions start. Formats are those of
libtpu 0.0.21. Invariants:

- a branch has `DELAY_SLOTS` bundles after it that run either way;
- a forward branch skips the bundles from there to its target (an `else` is a guard of its own, with
  the opposite predicate);
- a backward branch closes a loop, which holds its delay slots.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pallas_ops.chips import V6E

DELAY_SLOTS = 4
GRANULE_BYTES = 32
"""Unit of DMA sizes in the dump."""
VMATMUL_CYCLES = 8
"""Cycles that one vmatmul occupies its matrix unit: 16 rows of bf16 against 256 x 256."""
VMATMUL_FLOPS = 2 * 16 * V6E.mxu_width**2
"""Multiplications and additions of one: 16 rows against a whole matrix unit."""

_BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +(?:[A-Z]{2})? *:(?: >+)? ", re.MULTILINE)
_BRANCH = re.compile(r"= sbr\.rel .*?region = (\d+)")
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_COPY = re.compile(
    r"= dma\.(hbm_to_vmem|vmem_to_hbm) .*?/\*size_in_granules=\*/(%?\w+)(?:.*?/\*\s(.*?)\*/)?",
    re.DOTALL,
)
_VMEM = re.compile(r"space=vmem, size = (0x[0-9a-f]+), offset = (0x[0-9a-f]+|0)")


@dataclass(frozen=True)
class Region:
    """Bundles [first, last) that one branch controls."""

    kind: str
    """"loop", or "guard": bundles that a forward branch skips."""
    first: int
    """First bundle."""
    last: int
    """One past the last bundle."""
    children: tuple[Region, ...]
    """Regions inside it, in program order."""

    def own(self, per_bundle: np.ndarray) -> float:
        """Sum over the bundles of this region that are in none of its children."""
        inside = sum(per_bundle[child.first : child.last].sum() for child in self.children)
        return float(per_bundle[self.first : self.last].sum() - inside)


@dataclass(frozen=True)
class Copy:
    """One DMA between HBM and VMEM."""

    bundle: int
    """Where it is issued."""
    direction: str
    """"hbm_to_vmem" or "vmem_to_hbm"."""
    nbytes: int | None
    """Bytes, None where the size is in a register."""
    window: dict[str, tuple[int, ...]]
    """Integer attributes of the emitter: base_bounds, window_bounds, iteration_bounds ..."""


@dataclass(frozen=True)
class Schedule:
    """The final schedule of one kernel."""

    roots: tuple[Region, ...]
    """Regions outside all others, in program order."""
    copies: tuple[Copy, ...]
    """DMAs in program order."""
    slots: dict[str, np.ndarray]
    """[num_bundles] issue slots used, by unit: MXU XLU VALU EUP LOAD STORE SALU."""
    capacity: dict[str, int]
    """Issue slots a bundle, by unit."""
    vmatmuls: np.ndarray
    """[num_bundles] matrix products issued."""
    vmem_bytes: int
    """End of the last VMEM allocation: blocks, scratch and spills."""

    @property
    def num_bundles(self) -> int:
        """Bundles of the whole program."""
        return len(self.vmatmuls)

    @property
    def fixed_bundles(self) -> int:
        """Bundles outside the grid's loop, which run once. Raises as `main_loop`."""
        loop = self.main_loop
        return self.num_bundles - (loop.last - loop.first)

    @property
    def main_loop(self) -> Region:
        """The loop with the most bundles that is in no other: the grid's. Raises ValueError."""
        loops = [region for region in _flat(self.roots) if region.kind == "loop"]
        if not loops:
            raise ValueError("the schedule has no loop: a grid of one step; profile a larger shape")
        return max(loops, key=lambda region: region.last - region.first)


def read_schedule(folder: Path, name: str) -> Schedule:
    """Reads the last compiled kernel of `folder` whose name begins with `name`.

    The compiler may compile a fusion several times with other windows; the last is the one it kept.
    Raises ValueError, naming what the folder holds, when there is none.
    """
    pattern = re.compile(rf"(\d+)-{re.escape(name)}[.\d]*-\d+-final_bundles\.txt")
    found = sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    if not found:
        held = sorted({p.name.split("-")[1] for p in folder.glob("*-final_bundles.txt")})
        raise ValueError(f"no schedule of {name!r} in {folder}; there are {held}")
    stem = re.sub(r"-\d+-final_bundles\.txt", "", found[-1].name)

    def text(suffix: str) -> str:
        (path,) = folder.glob(f"{stem}-[0-9][0-9]-{suffix}.txt")
        return path.read_text()

    return parse_schedule(
        text("final_bundles"),
        text("final_hlo-static-per-bundle-utilization"),
        text("post-delay-converter"),
    )


def parse_schedule(bundles: str, utilization: str, allocations: str) -> Schedule:
    """Schedule from the text of its three files. Raises ValueError when they disagree."""
    listing = split_bundles(bundles)
    capacity, slots = parse_utilization(utilization)
    rows = len(next(iter(slots.values())))
    if rows != len(listing):
        raise ValueError(f"{len(listing)} bundles but {rows} rows of utilization: another format")
    return Schedule(
        roots=find_regions(listing),
        copies=find_copies(listing),
        slots=slots,
        capacity=capacity,
        vmatmuls=np.array([len(re.findall(r"\bvmatmul\.", b)) for b in listing]),
        vmem_bytes=max(
            (int(size, 16) + int(offset, 16) for size, offset in _VMEM.findall(allocations)),
            default=0,
        ),
    )


def split_bundles(text: str) -> list[str]:
    """The text of each bundle, comments of several lines included, without its address."""
    starts = [match.span() for match in _BUNDLE.finditer(text)]
    ends = [start for start, _ in starts[1:]] + [len(text)]
    return [text[begin:end] for (_, begin), end in zip(starts, ends, strict=True)]


def parse_utilization(text: str) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """Slots a bundle by unit, and slots used [num_bundles] by unit."""
    head, body = text.split("== UTILIZATION:")
    lines = [line for line in head.splitlines() if line.strip()]
    units = [unit.strip() for unit in lines[1].split("|")]
    capacity = dict(zip(units, map(int, lines[2].split()), strict=True))
    rows = [line.split() for line in body.splitlines() if re.fullmatch(r"[\d ]+", line.strip())]
    table = np.array(rows, dtype=np.int64).reshape(-1, len(units))
    return capacity, {unit: table[:, i] for i, unit in enumerate(units)}


def find_copies(listing: list[str]) -> tuple[Copy, ...]:
    """DMAs between HBM and VMEM. Bounds checks quote them; those quotes are not copies."""
    found = []
    for index, bundle in enumerate(listing):
        if "dma." not in bundle or "BoundsCheck" in bundle:
            continue
        for direction, size, attributes in _COPY.findall(bundle):
            window = {
                key: tuple(map(int, re.findall(r"\d+", values)))
                for key, values in re.findall(r"^(\w+): ([\d(), ]+?)\s*$", attributes, re.MULTILINE)
            }
            nbytes = GRANULE_BYTES * int(size) if size.isdigit() else None
            found.append(Copy(index, direction, nbytes, window))
    return tuple(found)


def window_bytes(copy: Copy) -> tuple[int, int]:
    """Bytes a step, and of the whole operand, of a copy that XLA's own emitter describes."""
    element = copy.window["element_size_in_bytes"][0]
    return (
        element * math.prod(copy.window["window_bounds"]),
        element * math.prod(copy.window["base_bounds"]),
    )


def find_regions(listing: list[str]) -> tuple[Region, ...]:
    """Loops and guards, nested. Raises ValueError at regions that overlap."""
    starts: dict[int, int] = {}
    branches = []
    for index, bundle in enumerate(listing):
        for name in _START.findall(bundle[bundle.rfind("}") :]):
            starts[int(name)] = index
        branches += [(index, int(name)) for name in _BRANCH.findall(bundle)]
    spans: list[tuple[int, int, str]] = []
    for index, name in branches:
        target, after = starts[name], index + 1 + DELAY_SLOTS
        if target <= index:
            spans.append((target, after, "loop"))
            continue
        spans.append((after, target, "guard"))
    return _nest(sorted(set(spans), key=lambda span: (span[0], -span[1], span[2] != "loop")))


def _nest(spans: list[tuple[int, int, str]]) -> tuple[Region, ...]:
    found = []
    while spans:
        (first, last, kind), rest = spans[0], spans[1:]
        inside = [span for span in rest if span[0] < last]
        for begin, end, _ in inside:
            if end > last:
                raise ValueError(f"regions [{first}, {last}) and [{begin}, {end}) overlap")
        if last > first:
            found.append(Region(kind, first, last, _nest(inside)))
        spans = rest[len(inside) :]
    return tuple(found)


def _flat(regions: tuple[Region, ...]) -> list[Region]:
    return [each for region in regions for each in (region, *_flat(region.children))]


def descendants(region: Region) -> list[Region]:
    """Regions inside `region`, each before those it holds."""
    return _flat(region.children)
