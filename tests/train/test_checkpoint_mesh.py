"""A checkpoint of one mesh goes on, on any other, as if the training had never stopped."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.train import checkpoint_worker

SAVED = 3
ON_FOUR = ["--fsdp", "4"]
MESHES = {
    "4": ON_FOUR,
    "8": ["--fsdp", "8"],
    # Restored only: that these train alike is shown by test_mesh.py.
    "2": ["--fsdp", "2", "--until", "0"],
    "1": ["--fsdp", "1", "--until", "0"],
    "2 x 2": ["--data", "2", "--fsdp", "2", "--until", "0"],
}
LOSS_TOLERANCE = 1e-5
"""Relative, over 3 steps in fp32 on another mesh: that of test_mesh.py."""

pytestmark = pytest.mark.slow


def run(out, folder, *options):
    environment = dict(os.environ, XLA_FLAGS="--xla_backend_optimization_level=0")
    command = [sys.executable, "-m", checkpoint_worker.__name__, str(out), str(folder), *options]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(out) as arrays:
        return dict(arrays), done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of the checkpoints, results) of an uninterrupted run on 4 devices."""
    folder = tmp_path_factory.mktemp("checkpoints")
    options = [*ON_FOUR, "--save", str(SAVED)]
    return folder / "run", run(folder / "out.npz", folder / "run", *options)[0]


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, marks=pytest.mark.exhaustive if mesh in ("8", "2 x 2") else ())
        for mesh in MESHES
    ],
)
def test_the_state_is_exact_and_the_losses_go_on(saved, mesh, tmp_path):
    folder, expected = saved
    shutil.copytree(folder, tmp_path / "run")
    found, text = run(tmp_path / "out.npz", tmp_path / "run", *MESHES[mesh])
    assert found["start"] == SAVED
    assert text.startswith(f"going on from step {SAVED}: {tmp_path}/run/step-00000003")
    states = {name: array for name, array in expected.items() if name.startswith("state/")}
    assert len(states) > 60
    for name, array in states.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
    assert np.abs(states["state/exp_avg_sq/embedding.weight"]).max() > 0
    assert states["state/num_updates"] == SAVED
    # Replicas of a shard are written once.
    assert found["num_copied"] == sum(array.size for array in states.values())
    if mesh in ("4", "8"):
        losses = expected["losses"][SAVED:]
        np.testing.assert_allclose(found["losses"], losses, 0 if mesh == "4" else LOSS_TOLERANCE)
        # What is loaded lies as a step leaves it: the step is compiled once.
        assert len(set(found["compilations"].tolist())) == 1
        assert found["compilations"][0] <= expected["compilations"][0]


def test_a_checkpoint_of_whole_experts_goes_on_with_split_ones(saved, tmp_path):
    folder, expected = saved
    shutil.copytree(folder, tmp_path / "run")
    found, text = run(tmp_path / "out.npz", tmp_path / "run", *ON_FOUR, "--split")
    assert text.splitlines()[1] == (
        "its weight layout 'stacked-1' is converted to 'stacked-1-split-experts': no bit changed"
    )
    assert "other settings" not in text
    states = {name: array for name, array in expected.items() if name.startswith("state/")}
    for name, array in states.items():
        if name.endswith(("experts.gate_up", "experts.down")):
            assert found[f"{name}_halves"].shape[2] == 2
            found[name] = found[f"{name}_halves"].reshape(array.shape)
        np.testing.assert_array_equal(found[name], array)
    np.testing.assert_allclose(found["losses"], expected["losses"][SAVED:], LOSS_TOLERANCE)
    assert len(set(found["compilations"].tolist())) == 1
