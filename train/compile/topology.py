"""TPU slices by name, as libtpu's compile-only client wants them described."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_ops.chips import V6E, Chip


@dataclass(frozen=True)
class Topology:
    """One slice."""

    name: str
    """As users say it: chip and number of chips."""
    grid: tuple[int, int]
    """Chips of the torus or mesh."""
    host_grid: tuple[int, int, int] = (2, 2, 1)
    """Chips of one host."""
    chip: Chip = V6E
    """Limits and rates of one chip."""

    @property
    def num_chips(self) -> int:
        """Chips of the slice."""
        return self.grid[0] * self.grid[1]

    @property
    def libtpu_name(self) -> str:
        """As libtpu spells it."""
        return f"{self.chip.name}:{self.grid[0]}x{self.grid[1]}"


_GRIDS = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))

TOPOLOGIES: dict[str, Topology] = {
    topology.name: topology
    for topology in (
        Topology(
            name=f"v6e-{x * y}",
            grid=(x, y),
            host_grid=(1, 1, 1) if x * y == 1 else (2, 2, 1),
        )
        for x, y in _GRIDS
    )
}
"""Every slice that can be named."""


def find_topology(name: str) -> Topology:
    """The slice called `name`. Raises ValueError listing the known ones."""
    if name not in TOPOLOGIES:
        raise ValueError(f"topology = {name!r}: unknown; use one of {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[name]
