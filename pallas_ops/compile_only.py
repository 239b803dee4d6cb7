"""libtpu's compile-only client: a StableHLO module in, an optimised program out, no TPU needed.

What libtpu reads from the environment must be there before its first use (train/launch.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def topology_devices(name: str, host_grid: tuple[int, int, int], num_slices: int = 1) -> list[Any]:
    """Devices of slices that are not here, one slice after the other: each is `name` as libtpu
    spells it, such as v6e:2x4, with `host_grid` chips a host."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        platform="tpu", topology_name=name, chips_per_host_bounds=host_grid, num_slices=num_slices
    ).devices


def compile_module(module: bytes, devices: Sequence[Any], *, dump: Path | None = None) -> Any:
    """Compiles MLIR bytecode for all of `devices`, partitioned by the layouts that it states.

    Returns the executable, which cannot run. With `dump`, a folder, the compiler writes there what
    it writes with xla_dump_to: passes' results, buffer assignment. Raises jax.errors'
    JaxRuntimeError with what the compiler said.
    """
    import jax
    from jax._src.lib import xla_client

    # Layouts are annotations for GSPMD, which is torch_xla's partitioner.
    jax.config.update("jax_use_shardy_partitioner", False)
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(devices)
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, len(devices)
    build.use_spmd_partitioning = True
    build.allow_spmd_sharding_propagation_to_parameters = [True]
    build.allow_spmd_sharding_propagation_to_output = [True]
    build.device_assignment = xla_client.DeviceAssignment.create(
        np.array([device.id for device in devices]).reshape(1, -1)
    )
    if dump is not None:
        build.debug_options.xla_dump_to = str(dump)
        build.debug_options.xla_dump_hlo_as_text = True
    client = devices[0].client
    return client.compile(module, xla_client.DeviceList(tuple(devices)), options)
