"""libtpu's compile-only client: a StableHLO module in, an optimised program and its sizes out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from train.compile.topology import Topology
    from train.compile.trace import TracedStep


@dataclass(frozen=True)
class Program:
    """What the compiler made of a step, for one chip."""

    hlo: str
    """The optimised, partitioned and scheduled program."""
    compile_s: float
    """Wall time of the compiler on this host."""
    argument_bytes: int
    """State and batch."""
    output_bytes: int
    """Results, those that replace state included."""
    alias_bytes: int
    """Of the outputs, what shares an argument's buffer."""
    temp_bytes: int
    """Peak of everything else."""
    code_bytes: int
    """The program itself."""

    @property
    def peak_bytes(self) -> int:
        """HBM that running it takes."""
        outputs = self.output_bytes - self.alias_bytes
        return self.argument_bytes + outputs + self.temp_bytes + self.code_bytes


class DoesNotFit(Exception):
    """The compiler found no way to hold the step in memory; the text is the compiler's."""


def compile_step(step: TracedStep, topology: Topology) -> Program:
    """Compiles for every chip of `topology`.

    Raises ValueError if the step is for another number of chips, DoesNotFit if it needs more memory
    than a chip has.
    """
    import jax
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    # The step's layouts are annotations for GSPMD, which is torch_xla's partitioner.
    jax.config.update("jax_use_shardy_partitioner", False)

    if step.num_chips != topology.num_chips:
        raise ValueError(
            f"the step is traced for mesh.data * mesh.fsdp = {step.num_chips} devices, but "
            f"{topology.name} has {topology.num_chips} chips: make them equal"
        )
    devices = topologies.get_topology_desc(
        platform="tpu",
        topology_name=topology.libtpu_name,
        chips_per_host_bounds=topology.host_grid,
        num_slices=1,
    ).devices
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(devices)
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, len(devices)
    build.use_spmd_partitioning = True
    build.allow_spmd_sharding_propagation_to_parameters = [True]
    build.allow_spmd_sharding_propagation_to_output = [True]
    build.device_assignment = xla_client.DeviceAssignment.create(
        np.arange(len(devices)).reshape(1, -1)
    )
    begun = time.perf_counter()
    try:
        executable = devices[0].client.compile(
            step.module, xla_client.DeviceList(tuple(devices)), options
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise DoesNotFit(str(error)) from None
        raise
    seconds = time.perf_counter() - begun
    stats = executable.get_compiled_memory_stats()
    return Program(
        hlo=executable.hlo_modules()[0].to_string(),
        compile_s=seconds,
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
    )
