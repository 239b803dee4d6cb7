"""A traced step through libtpu's compile-only client: the optimised program and its sizes."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pallas_ops.compile_only import compile_module, topology_devices
from train.compile.assignment import Assignment, parse_assignment

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
    """Everything else that is placed in HBM, constants included."""
    code_bytes: int
    """The program itself."""
    assignment: Assignment | None = None
    """Where each buffer lies, if the compiler said so."""

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

    if step.num_chips != topology.num_chips:
        raise ValueError(
            f"the step is traced for mesh.data * mesh.fsdp = {step.num_chips} devices, but "
            f"{topology.name} has {topology.num_chips} chips: make them equal"
        )
    devices = topology_devices(topology.libtpu_name, topology.host_grid, topology.num_slices)
    with tempfile.TemporaryDirectory(prefix="compile_") as folder:
        begun = time.perf_counter()
        try:
            executable = compile_module(step.module, devices, dump=Path(folder))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise DoesNotFit(str(error)) from None
            raise
        seconds = time.perf_counter() - begun
        (file,) = Path(folder).glob("*after_optimizations-buffer-assignment.txt")
        assignment = parse_assignment(file.read_text())
    stats = executable.get_compiled_memory_stats()
    return Program(
        hlo=executable.hlo_modules()[0].to_string(),
        compile_s=seconds,
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=assignment.temp_bytes + assignment.constant_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
        assignment=assignment,
    )
