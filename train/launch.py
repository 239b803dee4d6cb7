"""The process before any device exists: the one place that touches environment variables.

torch_xla and jax read theirs when they are imported or first used, so the mesh of a typed config
has to be written there first. One process a host owns all of its devices (SPMD): on a TPU slice
the same command runs on every host, and the hosts find each other by the slice's metadata.
"""

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from train.xla_flags import FLAGS, accepted_flags, explained, merged_arguments

if TYPE_CHECKING:
    from train.config import MeshConfig

_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_MERGED = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables that keep what they hold."""


def prepare_environment(
    mesh: "MeshConfig", environment: MutableMapping[str, str] = os.environ
) -> None:
    """Sets what torch_xla and jax read, for `mesh`. Call it before either is imported.

    cpu: PJRT_DEVICE=CPU, CPU_NUM_DEVICES (torch_xla's virtual devices), the same count in
    XLA_FLAGS (jax's, which must agree for kernels under SPMD), JAX_PLATFORMS=cpu.
    tpu: PJRT_DEVICE=TPU, and LIBTPU_INIT_ARGS with the flags of train/xla_flags.py for v6e that
    the installed libtpu takes, behind those that are set.
    both: TF_CPP_MIN_LOG_LEVEL=2 (errors of XLA's C++ alone), unless it is set.

    Raises ValueError for more than one process on this host, and for a variable that is already
    set to something else; RuntimeError if a library that reads them has been imported too soon.
    """
    refuse_several_processes(environment)
    wanted = _variables(mesh, environment)
    for name, value in wanted.items():
        present = environment.get(name)
        if name not in _MERGED and present not in (None, value):
            raise ValueError(
                f"{name}={present} is set, but mesh.platform = {mesh.platform!r} with "
                f"{mesh.num_devices} device(s) needs {name}={value}: unset it, or change the mesh "
                "(--mesh.platform, --mesh.fsdp, --mesh.data)"
            )
    missing = {name: value for name, value in wanted.items() if environment.get(name) != value}
    imported = [name for name in ("torch_xla", "jax") if name in sys.modules]
    if missing and imported:
        raise RuntimeError(
            f"{' and '.join(imported)} imported before the environment was prepared, without "
            + ", ".join(f"{name}={value}" for name, value in missing.items())
            + ": call train.launch.prepare_environment first, or start a new process"
        )
    environment.update(missing)
    # XLA otherwise prints a warning a compilation: that its partitioner is to be replaced one day.
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def refuse_without_chips(device_folder: Path = Path("/dev")) -> None:
    """Raises ValueError on a host that has no TPU chips: their runtime would look for them for
    minutes, and then fail with advice for another problem."""
    chips = [*device_folder.glob("accel*"), *device_folder.glob("vfio/[0-9]*")]
    if not chips:
        raise ValueError(
            "mesh.platform = 'tpu': this host has no TPU chips (no /dev/accel*, no /dev/vfio/N). "
            "Run on the slice's hosts; or look at the run from here: python -m train info, and "
            "python -m train compile"
        )


def prepare_tracing(
    environment: MutableMapping[str, str] = os.environ, *, libtpu_flags: Sequence[str] = ()
) -> None:
    """Sets what torch_xla, jax and libtpu read to trace and compile for a slice that is not here;
    `libtpu_flags` come after those that LIBTPU_INIT_ARGS has.

    One CPU device; instructions are named by what asked for them; libtpu asks no metadata server
    what machine this is (and does not complain that it got no answer), and several compilers may
    run beside each other. Raises RuntimeError if torch_xla or jax was imported too soon.
    """
    imported = [name for name in ("torch_xla", "jax") if name in sys.modules]
    if imported:
        raise RuntimeError(
            f"{' and '.join(imported)} imported before the environment was prepared: call "
            "train.launch.prepare_tracing first, or start a new process"
        )
    environment.update(
        PJRT_DEVICE="CPU",
        CPU_NUM_DEVICES="1",
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v6e-1",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        XLA_HLO_DEBUG="1",
    )
    if libtpu_flags:
        present = environment.get("LIBTPU_INIT_ARGS", "").split()
        environment["LIBTPU_INIT_ARGS"] = " ".join([*present, *libtpu_flags])
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def prepare_compiler(chip: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Adds to LIBTPU_INIT_ARGS the flags that change a program of a family of chips, such as
    "v6e", to compile what training would run. Call it before libtpu is used."""
    wanted = (flag for flag in FLAGS if flag.changes_program and chip in flag.chips)
    flags = accepted_flags(wanted, environment)
    present = environment.get("LIBTPU_INIT_ARGS", "")
    environment["LIBTPU_INIT_ARGS"] = merged_arguments(present, flags)


def libtpu_flags(environment: Mapping[str, str] = os.environ) -> list[tuple[str, str, str]]:
    """(name, value, reason) of every libtpu flag in force, once the environment is prepared."""
    return explained(environment.get("LIBTPU_INIT_ARGS", ""))


def refuse_several_processes(environment: MutableMapping[str, str] = os.environ) -> None:
    """Raises ValueError if a launcher (torchrun) started more than one process on this host."""
    processes = environment.get("LOCAL_WORLD_SIZE", "1")
    if not processes.isdecimal():
        raise ValueError(
            f"LOCAL_WORLD_SIZE = {processes!r}: no number of processes; unset it, or launch by "
            "torchrun --nproc_per_node=1"
        )
    if int(processes) > 1:
        raise ValueError(
            f"LOCAL_WORLD_SIZE = {processes}: one process a host owns all of its devices under "
            "SPMD, and a second one would wait for them forever. Use torchrun --nproc_per_node=1, "
            "or no launcher at all"
        )


def _variables(mesh: "MeshConfig", environment: Mapping[str, str]) -> dict[str, str]:
    if mesh.platform == "tpu":
        flags = accepted_flags((flag for flag in FLAGS if "v6e" in flag.chips), environment)
        present = environment.get("LIBTPU_INIT_ARGS", "")
        return {"PJRT_DEVICE": "TPU", "LIBTPU_INIT_ARGS": merged_arguments(present, flags)}
    count = str(mesh.num_devices)
    xla_flags = environment.get("XLA_FLAGS", "").split()
    others = [flag for flag in xla_flags if flag.split("=")[0] != _DEVICE_COUNT]
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": count,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*others, f"{_DEVICE_COUNT}={count}"]),
    }
