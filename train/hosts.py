"""The processes of a run, one a host, and what they have to agree on.

Under SPMD every host runs the same program; a decision that rests on one host's clock, signals or
disk has to be made by all of them at the same step. They talk over gloo on the CPU, never over the
devices, so nothing here waits for a step.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

Value = TypeVar("Value")
_TIMEOUT = timedelta(hours=1)
"""A host may compile, or write a checkpoint, while another waits for it."""


class Hosts:
    """This process among `count`. With one, every method returns at once.

    Two groups: `any` belongs to the training thread and `background`'s methods to the thread that
    writes checkpoints, since messages of one group must not cross.
    """

    def __init__(self, rank: int = 0, count: int = 1, init_method: str = "") -> None:
        """Waits for the others at `init_method` if there are any."""
        self.rank, self.count = rank, count
        self.background: dist.ProcessGroup | None = None
        if count > 1:
            dist.init_process_group(
                "gloo", init_method, rank=rank, world_size=count, timeout=_TIMEOUT
            )
            self.background = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    @property
    def is_first(self) -> bool:
        """Whether this process does what is done once for all."""
        return self.rank == 0

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag, true where it is true on any host. All hosts call it at the same step."""
        if self.count == 1:
            return flags
        votes = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        return tuple(bool(vote) for vote in votes)

    def gather(self, value: Value) -> list[Value]:
        """`value` of every host, in the background group."""
        if self.count == 1:
            return [value]
        values: list[Value | None] = [None] * self.count
        dist.all_gather_object(values, value, group=self.background)
        return values  # type: ignore[return-value]


def connect_hosts() -> Hosts:
    """The hosts of this process's runtime, which must be up and in SPMD mode."""
    import torch_xla.distributed.xla_backend  # noqa: F401  # knows what xla:// means
    import torch_xla.runtime as xr

    from train.launch import rendezvous

    count = xr.process_count()
    return Hosts(xr.process_index(), count, rendezvous() if count > 1 else "")
