"""TPU slices by name, as libtpu's compile-only client wants them described."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod

from pallas_ops.chips import V5E, V5P, V6E, Chip


@dataclass(frozen=True)
class Topology:
    """One slice, or several of a kind."""

    name: str
    """As users say it: chip and chips of a slice, and the number of slices in front if there are
    several: 2xv6e-128."""
    grid: tuple[int, ...]
    """Chips of a slice's torus or mesh, along two or three axes."""
    host_grid: tuple[int, int, int] = (2, 2, 1)
    """Chips of one host."""
    chip: Chip = V6E
    """Limits and rates of one chip."""
    num_slices: int = 1
    """Slices, which only the data-centre network (DCN) joins."""

    @property
    def num_chips(self) -> int:
        """Chips of all slices."""
        return self.num_slices * prod(self.grid)

    @property
    def libtpu_name(self) -> str:
        """As libtpu spells it."""
        return f"{self.chip.name}:{'x'.join(map(str, self.grid))}"


_PLANES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8))

TOPOLOGIES: dict[str, Topology] = {
    topology.name: topology
    for topology in (
        Topology(
            name=f"{chip.name}-{prod(grid)}",
            grid=grid,
            host_grid=(1, 1, 1) if prod(grid) == 1 else (2, 2, 1),
            chip=chip,
        )
        for chip, grids in ((V6E, _PLANES), (V5E, _PLANES), (V5P, _CUBES))
        for grid in grids
    )
}
"""Every slice that can be named. The number counts chips, for v5p too, which Google's own names
count in cores."""


def find_topology(name: str) -> Topology:
    """The slice called `name`, or N of it as NxNAME. Raises ValueError listing the known ones."""
    several = re.fullmatch(r"(\d+)x(.+)", name)
    num_slices, single = (int(several[1]), several[2]) if several else (1, name)
    if single not in TOPOLOGIES or num_slices < 1:
        raise ValueError(
            f"topology = {name!r}: unknown; use one of {', '.join(TOPOLOGIES)}, or several slices "
            "of one as in 2xv6e-128"
        )
    return _several(TOPOLOGIES[single], num_slices)


def next_larger(topology: Topology) -> Topology | None:
    """As many slices, each of the next size with more of the same chips; None after the largest."""
    family = [t for t in TOPOLOGIES.values() if t.chip == topology.chip]
    larger = [t for t in family if prod(t.grid) > prod(topology.grid)]
    found = min(larger, key=lambda t: t.num_chips, default=None)
    return found and _several(found, topology.num_slices)


def _several(topology: Topology, num_slices: int) -> Topology:
    if num_slices == 1:
        return topology
    return replace(topology, name=f"{num_slices}x{topology.name}", num_slices=num_slices)
