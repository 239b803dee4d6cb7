"""One of two hosts that save and restore a sharded tensor; see test_hosts.py.

python -m tests.train.hosts_worker RANK FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch


def main(rank: int, folder: str) -> None:
    from train.config import MeshConfig
    from train.launch import prepare_environment

    prepare_environment(MeshConfig(fsdp=1))
    from torch_xla import runtime
    from torch_xla.distributed.spmd import XLAShard
    from torch_xla.experimental.distributed_checkpoint._helpers import _CpuShards

    from train.checkpoint import checkpointer, tensors
    from train.checkpoint.checkpointer import Checkpointer
    from train.exit_codes import StorageFailure
    from train.hosts import connect_hosts
    from train.presets import cpu_tiny

    runtime.use_spmd()
    # The runtime of a slice of two hosts, as far as they ask it.
    runtime.process_count, runtime.process_index = lambda: 2, lambda: rank
    hosts = connect_hosts()
    results: dict[str, object] = {"any": hosts.any(rank == 0, rank == 1, False)}
    full = torch.arange(40.0).view(8, 5)

    def half(tensors: dict[str, torch.Tensor]) -> dict[str, object]:
        """What a host of a mesh of two copies: rows of its own."""
        rows = slice(4 * rank, 4 * rank + 4)
        shard = XLAShard(full[rows] * 1, [rows, slice(0, 5)], "CPU:0", 0)
        return tensors | {"w": _CpuShards([shard], torch.Size([8, 5]))}

    checkpointer.host_copy = half

    class Data:
        def state_dict(self) -> dict[str, int]:
            return {"next": 3}

        def load_state_dict(self, state: dict[str, int]) -> None:
            results["data"] = state

    def run(address: str) -> tuple[Checkpointer, dict[str, torch.Tensor], list[str]]:
        live, told = {"w": torch.zeros(8, 5), "n": torch.zeros(())}, []
        config = replace(cpu_tiny(), steps=1000)
        lay = lambda name, tensor: tensor  # noqa: E731
        made = Checkpointer(config, address, hosts, live, Data(), torch.clone, lay, told.append)
        return made, live, told

    made, _, _ = run(folder)
    results["before"] = made.restore()
    for step in (1, 2):
        made.save(step)
        made.wait()
    results["files"] = sorted(path.name for path in Path(folder, "step-00000002").iterdir())

    made, found, _ = run(folder)
    results["restored"] = [made.restore(), torch.equal(found["w"], full)]
    hosts.gather(None)
    # A shard of the other host is damaged: one of the two sees it, both go back.
    if hosts.is_first:
        path = Path(folder, "step-00000002", "__1_0.distcp")
        path.write_bytes(path.read_bytes()[:-7])
    hosts.gather(None)
    made, found, told = run(folder)
    results["after damage"] = [made.restore(), torch.equal(found["w"], full), told]

    made, _, _ = run(f"{folder}-of-host-{rank}")
    try:
        made.restore()
    except ValueError as error:
        results["private"] = str(error)

    # The other host's disk fails.
    if rank == 1:
        tensors._HashingStream.write = _fail
    made, _, _ = run(f"{folder}-full")
    made.save(5)
    try:
        made.wait()
    except StorageFailure as error:
        results["full"] = str(error)
    print(json.dumps(results))


def _fail(self: object, data: bytes) -> int:
    self.failure = OSError(28, "No space left on device")
    raise self.failure


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
