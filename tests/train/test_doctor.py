"""`python -m train doctor`: what is wrong is found, and told with its cure."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from train.config import CheckpointConfig, LogConfig, MeshConfig
from train.doctor import children, devices, folders
from train.doctor.command import examine
from train.doctor.finding import Finding, findings_table
from train.doctor.versions import PAIRED, check_versions, declared_pins
from train.presets import cpu_tiny, gemma4_26b_a4b
from train.sharding import sharding_table


def as_text(findings):
    console = Console(width=80)
    with console.capture() as captured:
        console.print(findings_table(findings))
    return captured.get()


# Findings


def test_a_failure_has_a_cure_and_nothing_else_has():
    for state, cure in (("failed", ""), ("ok", "rest"), ("not run", "rest")):
        with pytest.raises(ValueError, match="give what failed a cure"):
            Finding("check", state, "result", cure)


def test_the_table_shows_cures_under_their_checks_in_80_columns():
    findings = [
        Finding("devices", "failed", "of [4] none answers " * 8, "look [here]"),
        Finding("a kernel", "not run", "devices has to work first"),
    ]
    lines = as_text(findings).splitlines()
    assert max(map(len, lines)) <= 80
    (cure,) = (line for line in lines if "cure" in line)
    assert cure.split() == ["cure", "look", "[here]"]
    assert lines.index(cure) < next(i for i, line in enumerate(lines) if "a kernel" in line)


# Versions

PINS = {
    name: Requirement(f"{name}=={version}")
    for name, version in zip(PAIRED, ("2.9.0", "2.9.0", "0.7.1", "0.7.1", "0.0.21"), strict=True)
}
RIGHT = {name: str(pin.specifier).lstrip("=") for name, pin in PINS.items()}


def versions(*, needs_libtpu=True, **changes):
    installed = RIGHT | {name.replace("_nightly", "-nightly"): v for name, v in changes.items()}

    def version(name):
        if installed.get(name) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    return check_versions(needs_libtpu=needs_libtpu, version=version, pins=PINS)


def test_pins_are_those_that_setup_declares():
    declared = {name: pin.specifier for name, pin in declared_pins().items()}
    assert declared == {name: pin.specifier for name, pin in PINS.items()}
    assert check_versions(needs_libtpu=True).state == "ok"


@pytest.mark.parametrize(
    ("changes", "state", "cure"),
    [
        ({}, "ok", ""),
        ({"torch": "2.9.0+cpu"}, "ok", ""),
        ({"libtpu": None, "needs_libtpu": False}, "ok", ""),
        ({"libtpu": None}, "failed", "pip install 'libtpu==0.0.21'"),
        ({"libtpu": "0.0.30", "needs_libtpu": False}, "failed", "pip install 'libtpu==0.0.21'"),
        ({"jax": "0.8.0", "jaxlib": "0.8.0"}, "failed", "install 'jax==0.7.1' 'jaxlib==0.7.1'"),
        ({"torch_xla": "2.8.0"}, "failed", "pip install 'torch_xla==2.9.0': only this set"),
        ({"libtpu_nightly": "0.1.dev1"}, "failed", "pip uninstall libtpu-nightly"),
    ],
)
def test_versions_that_do_not_fit_are_named_with_the_command_that_mends_them(changes, state, cure):
    finding = versions(**changes)
    assert finding.state == state and cure in finding.cure
    assert "torch_xla" in finding.result


def test_a_checkout_that_is_not_installed_is_told(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    finding = check_versions(needs_libtpu=False)
    assert finding.state == "failed" and "pip install -e ." in finding.cure


# Folders


def config_in(log, **checkpoint):
    log, checkpoint = LogConfig(dir=str(log)), CheckpointConfig(**checkpoint)
    return replace(cpu_tiny(), log=log, checkpoint=checkpoint)


def test_folders_that_can_be_written_are_left_as_they_were(tmp_path):
    config = config_in(tmp_path / "a" / "b", folder=str(tmp_path / "c"))
    assert folders.check_log_folder(config).state == "ok"
    finding = folders.check_checkpoint_folder(config)
    assert finding.state == "ok" and "a checkpoint takes 22.08 MB" in finding.result
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "old").touch()
    assert folders.check_checkpoint_folder(config).state == "ok"
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["old"]


@pytest.mark.parametrize("check", [folders.check_log_folder, folders.check_checkpoint_folder])
def test_a_folder_that_cannot_be_written_fails(check, tmp_path):
    (tmp_path / "file").touch()
    finding = check(config_in(tmp_path / "file" / "runs"))
    assert finding.state == "failed" and "Not a directory" in finding.result
    assert ("--log.dir" if check is folders.check_log_folder else "--checkpoint") in finding.cure


def test_a_log_folder_without_locks_fails(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folders.fcntl, "flock", flock)
    finding = folders.check_log_folder(config_in(tmp_path))
    assert finding.state == "failed" and "No locks available" in finding.result
    assert "local disk" in finding.cure


def test_a_store_is_asked_by_its_address():
    finding = folders.check_checkpoint_folder(config_in("runs", folder="memory://bucket/runs"))
    assert finding.state == "ok" and "free" not in finding.result
    finding = folders.check_checkpoint_folder(config_in("runs", folder="nosuch://bucket"))
    assert finding.state == "failed" and "install what is missing" in finding.cure


class ForgetfulStore:
    protocol = "forgetful"

    def pipe_file(self, path, content):
        pass

    def cat_file(self, path):
        return b"another"

    def rm_file(self, path):
        pass


class ClosedStore(ForgetfulStore):
    def pipe_file(self, path, content):
        raise PermissionError("403 storage.objects.create denied")


@pytest.mark.parametrize(
    ("store", "result", "cure"),
    [
        (ForgetfulStore(), "gives back other bytes", "do not train into it"),
        (ClosedStore(), "403 storage.objects.create denied", "service account"),
    ],
)
def test_a_store_that_does_not_keep_what_is_written_fails(store, result, cure, monkeypatch):
    monkeypatch.setattr(folders.fsspec.core, "url_to_fs", lambda address: (store, address))
    finding = folders.check_checkpoint_folder(config_in("runs", folder="x://bucket"))
    assert finding.state == "failed" and result in finding.result and cure in finding.cure


def test_a_disk_too_small_for_a_checkpoint_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=22 * 10**6))
    finding = folders.check_checkpoint_folder(config_in(tmp_path))
    assert finding.state == "failed" and "22 MB free" in finding.result
    off = config_in(tmp_path, every_minutes=0, every_steps=0)
    assert folders.check_checkpoint_folder(off).state == "not run"


# Checks in processes of their own

FIRST = Finding("first", "ok", "well").to_json() + "\n"


def run_fake(monkeypatch, *, stdout="", stderr="", code=0, hangs=False):
    def run(command, **options):
        if hangs:
            raise subprocess.TimeoutExpired(command, options["timeout"], stdout.encode(), None)
        return SimpleNamespace(stdout=stdout, stderr=stderr, returncode=code)

    monkeypatch.setattr(children.subprocess, "run", run)
    return children.run_checks("fake", [], ("first", "second", "third"), 90)


@pytest.mark.parametrize(
    ("stderr", "result", "cure"),
    [
        (
            "noise\nRuntimeError: ABORTED: The TPU is already in use by process with pid 71. Not\n",
            "already in use",
            "process 71 holds the chips: wait for it, or stop it (kill 71)",
        ),
        (
            "E: INTERNAL: Unsupported version: expected <= 7 but got 8\n\nat location: loc(x)\n",
            "expected <= 7 but got 8",
            "libtpu and jax are not of one time",
        ),
        ("ImportError: _XLAC.so: undefined symbol: _ZN3c10\n", "undefined symbol", "new env"),
        ("RESOURCE_EXHAUSTED: out of HBM\n", "out of HBM", "another process"),
        ("trace\nAborted (core dumped)\n\n", "ended with -6, saying: Aborted", "run it again"),
        ("", "saying: nothing", "run it again"),
    ],
)
def test_what_a_dying_process_says_has_a_cure(stderr, result, cure, monkeypatch):
    first, second, third = run_fake(monkeypatch, stdout=FIRST, stderr=stderr, code=-6)
    assert (first.state, second.state, third.state) == ("ok", "failed", "not run")
    assert result in second.result and cure in second.cure
    assert third.result == "second has to work first"


def test_a_process_that_hangs_is_told_with_what_it_found_before(monkeypatch):
    first, second, third = run_fake(monkeypatch, stdout="noise\n" + FIRST, hangs=True)
    assert (first.state, second.state, third.state) == ("ok", "failed", "not run")
    assert second.result == "no answer in 1.5 minutes" and "--worker=all" in second.cure


def test_what_follows_a_failed_check_is_not_run(monkeypatch):
    failed = Finding("second", "failed", "wrong", "mend it")
    found = run_fake(monkeypatch, stdout=f"{FIRST}{failed.to_json()}\n")
    assert found[1] == failed and [one.state for one in found] == ["ok", "failed", "not run"]


def test_findings_are_printed_up_to_the_first_that_failed(capsys):
    def findings():
        yield Finding("first", "ok", "well")
        yield Finding("second", "failed", "wrong", "mend it")
        raise AssertionError("not reached")

    children.print_findings(findings())
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["ok", "failed"]


# Devices


@pytest.mark.parametrize("factor", [1.0, 1.02, float("nan")])
def test_a_wrong_product_is_found(factor):
    from pallas_ops import gmm

    finding = devices.check_kernel(lambda *operands: gmm(*operands) * factor)
    assert (finding.state == "ok") == (factor == 1.0)
    assert ("do not train on this host" in finding.cure) == (factor != 1.0)


@pytest.mark.parametrize(
    ("losses", "state", "cure"),
    [
        ([5.5, 5.4], "ok", ""),
        ([5.5, 5.5], "failed", "the loss does not fall"),
        ([5.6, 5.4], "failed", "the loss does not begin as plain torch does"),
        ([float("nan"), 5.4], "failed", "does not begin"),
        ([5.5, float("nan")], "failed", "does not fall"),
    ],
)
def test_losses_begin_as_they_should_and_fall(losses, state, cure):
    finding = devices.judge_losses(losses, 5.501, 0.01)
    assert finding.state == state and cure in finding.cure


@pytest.mark.parametrize("fsdp", [1, 2, 3, 4, 8, 128, 256])
def test_the_small_run_fits_any_mesh_and_takes_the_kernels_on_a_tpu(fsdp):
    run = devices.small_run(MeshConfig(platform="tpu", fsdp=fsdp, data=2))
    sharding_table(run.model, run.mesh)
    assert run.dispatch_in_force == ("kernel", None) and run.attention == "kernel"
    if fsdp < 128:
        on_cpu = devices.small_run(MeshConfig(fsdp=fsdp))
        assert on_cpu.attention == "einsum" and on_cpu.precision.compute == "float32"


# The command


def test_no_time_is_refused():
    with pytest.raises(ValueError, match="minutes = 0: give the checks some time"):
        examine(cpu_tiny(), 0)


def doctor(folder, *options):
    """(status, output) of `python -m train doctor`."""
    done = subprocess.run(
        [sys.executable, "-m", "train", "doctor", "--log.dir", str(folder / "runs"), *options],
        capture_output=True,
        text=True,
    )
    assert not list(folder.iterdir())
    return done.returncode, done.stdout + done.stderr


@pytest.mark.libtpu
def test_a_host_without_chips_is_no_place_for_a_tpu_run(tmp_path):
    status, text = doctor(tmp_path, "--preset", gemma4_26b_a4b.__name__)
    assert status == 2, text
    words = " ".join(text.split())
    assert "kernels for v6e ok libtpu 0.0.21 compiles gmm, written as Mosaic IR 7" in words
    assert "devices failed mesh.platform = 'tpu' cure this host has no TPU chips" in words
    assert "training steps not run devices has to work first" in words
    assert words.endswith("failed")


@pytest.mark.slow
def test_a_machine_that_can_train_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    status, text = doctor(tmp_path, "--mesh.fsdp", "2")
    assert status == 0, text
    assert "failed" not in text and "not run" not in text
    assert "loss" in text and text.splitlines()[-1] == "ready to train on 2 device(s) (CPU)"
