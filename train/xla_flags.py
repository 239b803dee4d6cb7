"""Flags of the TPU compiler and runtime: one table, the same for training and for `compile`.

They go into LIBTPU_INIT_ARGS (train/launch.py), which libtpu reads once, when it is loaded; what a
user has set there stays as it is. Sources: the recipes published for v6e (MaxText, torchprime), and
what torch_xla 2.9 sets by itself where it finds chips. None is measured here. With libtpu 0.0.21
the first alone changes cpu_tiny's step for v6e-8; the others state what its defaults choose there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class XlaFlag:
    """One flag."""

    name: str
    """Without dashes."""
    value: str
    """As libtpu spells it."""
    reason: str
    """Why it is not left at its default."""
    changes_program: bool = True
    """False: it is for the runtime, and `compile` has no use for it."""
    chips: tuple[str, ...] = ("v6e", "v5e", "v5p")
    """Families that it is for."""

    @property
    def argument(self) -> str:
        """As LIBTPU_INIT_ARGS has it."""
        return f"--{self.name}={self.value}"


FLAGS = (
    XlaFlag(
        "xla_tpu_scoped_vmem_limit_kib",
        "81920",
        "a fusion may hold 80 of the 128 MiB of VMEM, as v6e's MoE recipes let it",
        chips=("v6e",),
    ),
    XlaFlag(
        "xla_enable_async_all_gather",
        "true",
        "weights are gathered while the layer before computes",
    ),
    XlaFlag(
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "true",
        "a gather's steps run inside the fusions beside it",
    ),
    XlaFlag(
        "xla_tpu_prefer_async_allgather_to_allreduce",
        "true",
        "a gathered weight is dropped and gathered again, not kept (torch_xla's own)",
    ),
    XlaFlag(
        "xla_tpu_enable_flash_attention",
        "false",
        "no rewriting of what looks like attention: the kernels are ours (torch_xla's own)",
    ),
    XlaFlag(
        "xla_tpu_use_enhanced_launch_barrier",
        "false",
        "its barrier hangs torch_xla, pytorch/xla issue 9084 (torch_xla's own)",
        changes_program=False,
    ),
)
"""In force, in the order in which they are printed."""

CANDIDATES = (
    XlaFlag(
        "xla_tpu_enable_sparse_core_collective_offload_all_gather",
        "true",
        "SparseCores gather weights while the TensorCore computes (MaxText's v6e recipe)",
        chips=("v6e",),
    ),
    XlaFlag(
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
        "true",
        "SparseCores reduce gradients, and more as reduce-scatter (MaxText's v6e recipe)",
        chips=("v6e",),
    ),
    XlaFlag(
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
        "true",
        "SparseCores reduce what is not scattered (MaxText's v6e recipe)",
        chips=("v6e",),
    ),
)
"""Not in force, for a user to try through LIBTPU_INIT_ARGS: each changes the program, and without a
TPU there is no telling whether for the better."""

_PROBE = """
import libtpu
from jaxlib import xla_client
xla_client.load_pjrt_plugin_dynamically("tpu", libtpu.get_library_path())
xla_client.initialize_pjrt_plugin("tpu")
"""
_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""The probe asks no metadata server and takes no lock: it touches no chip."""
_REFUSED = re.compile(r"(?:Unknown command line flag|specified for flag) '(\w+)'")


def accepted_flags(flags: Iterable[XlaFlag], environment: Mapping[str, str]) -> tuple[XlaFlag, ...]:
    """Those of `flags` that the installed libtpu takes: it ends a process over one that it does not
    know, so a process is started that does nothing but load it (half a second).

    Raises ValueError where libtpu is not installed, RuntimeError if it fails for another reason.
    """
    flags = tuple(flags)
    while True:
        arguments = " ".join(flag.argument for flag in flags)
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**environment, **_QUIET, "LIBTPU_INIT_ARGS": arguments},
            capture_output=True,
            text=True,
        )
        if done.returncode == 0:
            return flags
        if "No module named 'libtpu'" in done.stderr:
            raise ValueError(
                "libtpu is not installed: pip install -e '.[tpu]' on a TPU host, "
                "pip install -e '.[aot]' to compile without one"
            )
        refused = set(_REFUSED.findall(done.stderr))
        kept = tuple(flag for flag in flags if flag.name not in refused)
        if len(kept) == len(flags):
            raise RuntimeError(f"libtpu cannot be loaded: {done.stderr[-2000:]}")
        flags = kept


def merged_arguments(present: str, flags: Iterable[XlaFlag]) -> str:
    """LIBTPU_INIT_ARGS with `flags` behind what is there, except those it has already."""
    taken = {name for name, _ in parse_arguments(present)}
    added = [flag.argument for flag in flags if flag.name not in taken]
    return " ".join([*present.split(), *added])


def parse_arguments(arguments: str) -> list[tuple[str, str]]:
    """(name, value) of each flag in LIBTPU_INIT_ARGS; a flag without a value is true."""
    pairs = (argument.lstrip("-").partition("=") for argument in arguments.split())
    return [(name, value if equals else "true") for name, equals, value in pairs]


def explained(arguments: str) -> list[tuple[str, str, str]]:
    """(name, value, reason) of each flag in LIBTPU_INIT_ARGS, ours or not."""
    ours = {flag.name: flag for flag in (*FLAGS, *CANDIDATES)}
    found = []
    for name, value in parse_arguments(arguments):
        flag = ours.get(name)
        reason = flag.reason if flag and flag.value == value else "set outside this program"
        found.append((name, value, reason))
    return found
