"""Rows moved by the dispatch kernels on a mesh: the training that gathers give on as many devices.

The kernels take bf16 rows whose width is a multiple of 128, so this is another micro model than
test_mesh.py's, with several blocks of 256 tokens on one device and a part of one on eight. That
gathers train alike on any number of devices is test_mesh.py's matter.
"""

import numpy as np
import pytest

from tests.train import mesh_worker
from tests.train.processes import run_module

MODEL = ["--hidden_size", "128", "--compute", "bfloat16", "--batch_size", "32", "--steps", "2"]
MESHES = {
    "1 device": ["--fsdp", "1"],
    "4 devices": ["--fsdp", "4"],
    "8 devices, recomputed": ["--fsdp", "8", "--recompute", "full"],
}
GRADIENT_TOLERANCE = 1e-5
"""Relative norm of each tensor's difference: a row's sum over its experts may be in another order,
but no product and no reduction over the mesh is."""

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module", params=list(MESHES))
def runs(request, tmp_path_factory):
    """Arrays of a run with gathers and of one with the kernels."""
    folder = tmp_path_factory.mktemp("mesh_dispatch")
    found = []
    for dispatch in ("gather", "kernel"):
        out = folder / f"{dispatch}.npz"
        options = [*MODEL, *MESHES[request.param], "--dispatch", dispatch]
        flags = "--xla_backend_optimization_level=0"
        run_module(mesh_worker.__name__, out, *options, XLA_FLAGS=flags)
        with np.load(out) as arrays:
            found.append(dict(arrays))
    return found


def test_kernels_train_as_gathers_do(runs):
    gather, kernel = runs
    np.testing.assert_allclose(kernel["losses"], gather["losses"], rtol=1e-6)
    grads = [key for key in gather if key.startswith("grad/")]
    assert len(grads) > 40
    for key in grads:
        norm = np.linalg.norm(gather[key])
        difference = np.linalg.norm(kernel[key] - gather[key])
        assert 0 < norm and difference < GRADIENT_TOLERANCE * norm, (key, difference / norm)


def test_gradients_lie_as_their_parameters_do(runs):
    for arrays in runs:
        specs = {k: str(v) for k, v in arrays.items() if k.startswith("spec/")}
        assert specs
        for key, pair in specs.items():
            gradient, _, parameter = pair.partition(" | ")
            assert gradient == parameter, key
