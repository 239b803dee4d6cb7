"""The environment of a process, before devices exist."""

import subprocess
import sys
from types import ModuleType

import pytest

from train.config import MeshConfig
from train.launch import (
    prepare_environment,
    prepare_tracing,
    refuse_several_processes,
    refuse_without_chips,
)
from train.xla_flags import FLAGS

CPU = {
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": "6",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=6",
}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}
MESH = MeshConfig(fsdp=3, data=2)


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch):
    for name in ("jax", "torch_xla"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_cpu_mesh():
    environment = {"HOME": "/root"}
    prepare_environment(MESH, environment)
    assert environment == CPU | QUIET | {"HOME": "/root"}


def test_a_log_level_of_the_users_own_is_kept():
    environment = {"TF_CPP_MIN_LOG_LEVEL": "0"}
    prepare_environment(MESH, environment)
    assert environment["TF_CPP_MIN_LOG_LEVEL"] == "0"


def test_xla_flags_are_kept_and_the_count_replaced():
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_dump_to=/tmp/x"}
    prepare_environment(MESH, environment)
    assert environment["XLA_FLAGS"] == f"--xla_dump_to=/tmp/x {CPU['XLA_FLAGS']}"


def test_tpu_mesh():
    environment = {}
    mesh = MeshConfig(platform="tpu", fsdp=128)
    prepare_environment(mesh, environment)
    flags = " ".join(flag.argument for flag in FLAGS)
    assert environment == {"PJRT_DEVICE": "TPU", "LIBTPU_INIT_ARGS": flags} | QUIET


def test_libtpu_flags_of_the_users_own_win(monkeypatch):
    mesh, name = MeshConfig(platform="tpu", fsdp=4), FLAGS[0].name
    environment = {"LIBTPU_INIT_ARGS": f"--{name}=1"}
    prepare_environment(mesh, environment)
    arguments = environment["LIBTPU_INIT_ARGS"].split()
    assert arguments == [f"--{name}=1", *(flag.argument for flag in FLAGS[1:])]
    monkeypatch.setitem(sys.modules, "jax", ModuleType("jax"))
    prepare_environment(mesh, environment)  # already right: nothing to do
    with pytest.raises(RuntimeError, match=r"jax imported before .* without LIBTPU_INIT_ARGS="):
        prepare_environment(mesh, {"PJRT_DEVICE": "TPU"})


@pytest.mark.parametrize(
    ("name", "value"), [("PJRT_DEVICE", "TPU"), ("CPU_NUM_DEVICES", "4"), ("JAX_PLATFORMS", "tpu")]
)
def test_another_setting_is_refused(name, value):
    environment = {name: value}
    with pytest.raises(ValueError, match=f"{name}={value} is set, but .* needs {name}={CPU[name]}"):
        prepare_environment(MESH, environment)
    assert environment == {name: value}


@pytest.mark.parametrize("library", ["jax", "torch_xla"])
def test_too_late(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, ModuleType(library))
    with pytest.raises(RuntimeError, match=f"{library} imported before .* without PJRT_DEVICE=CPU"):
        prepare_environment(MESH, {})
    prepare_environment(MESH, dict(CPU))  # already right: nothing to do


def test_one_process_a_host():
    refuse_several_processes({})
    refuse_several_processes({"LOCAL_WORLD_SIZE": "1"})
    with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE = 4: one process a host owns all"):
        prepare_environment(MESH, {"LOCAL_WORLD_SIZE": "4"})


def test_torchrun_with_two_processes_ends_with_the_reason():
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "train"],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "error: LOCAL_WORLD_SIZE = 2: one process a host owns all" in done.stderr


def test_a_host_without_chips_is_told_so(tmp_path):
    with pytest.raises(ValueError, match=r"mesh\.platform = 'tpu': this host has no TPU chips"):
        refuse_without_chips(tmp_path)
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()  # the driver's own node is no chip
    with pytest.raises(ValueError, match="no TPU chips"):
        refuse_without_chips(tmp_path)
    (tmp_path / "vfio" / "0").touch()
    refuse_without_chips(tmp_path)


def test_tracing_adds_compiler_flags_to_those_that_are_set(monkeypatch):
    for name in ("torch_xla", "jax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    environment = {"LIBTPU_INIT_ARGS": "--a=1"}
    prepare_tracing(environment, libtpu_flags=("--b=2", "--c"))
    assert environment["LIBTPU_INIT_ARGS"] == "--a=1 --b=2 --c"
    assert environment["PJRT_DEVICE"] == "CPU" and environment["XLA_HLO_DEBUG"] == "1"
    environment = {}
    prepare_tracing(environment)
    assert "LIBTPU_INIT_ARGS" not in environment
