"""TPU slices by name, as libtpu's compile-only client wants them described."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from pallas_ops.chips import V5E, V5P, V6E, Chip


@dataclass(frozen=True)
class Topology:
    """One slice."""

    name: str
    """As users say it: chip and number of chips."""
    grid: tuple[int, ...]
    """Chips of the torus or mesh, along two or three axes."""
    host_grid: tuple[int, int, int] = (2, 2, 1)
    """Chips of one host."""
    chip: Chip = V6E
    """Limits and rates of one chip."""

    @property
    def num_chips(self) -> int:
        """Chips of the slice."""
        return prod(self.grid)

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
    """The slice called `name`. Raises ValueError listing the known ones."""
    if name not in TOPOLOGIES:
        raise ValueError(f"topology = {name!r}: unknown; use one of {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[name]


def next_larger(topology: Topology) -> Topology | None:
    """The next slice with more of the same chips, None after the largest."""
    family = [t for t in TOPOLOGIES.values() if t.chip == topology.chip]
    larger = [t for t in family if t.num_chips > topology.num_chips]
    return min(larger, key=lambda t: t.num_chips, default=None)
