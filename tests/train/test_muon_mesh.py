"""Muon on a mesh: the values of one device, and no matrix of an expert leaves its device."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from tests.train import muon_worker
from tests.train.processes import run_module

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("muon")
    run_module(
        muon_worker.__name__,
        folder / "out.npz",
        TF_CPP_MIN_LOG_LEVEL="2",
        XLA_FLAGS=f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text",
    )
    programs = (folder / "dump").glob("*after_optimizations.txt")
    largest = max(programs, key=lambda path: path.stat().st_size)
    with np.load(folder / "out.npz") as arrays:
        return dict(arrays), largest.read_text()


def test_values_are_those_of_one_device(run):
    stream = muon_worker.draws()
    parameters = {name: nn.Parameter(value) for name, value in next(stream).items()}
    optimizer = muon_worker.make_optimizer(parameters)
    for _ in range(muon_worker.NUM_STEPS):
        for name, grad in next(stream).items():
            parameters[name].grad = grad
        optimizer.step()
    for name, parameter in parameters.items():
        found = torch.from_numpy(run[0][f"value/{name}"])
        torch.testing.assert_close(found, parameter.detach(), rtol=1e-4, atol=1e-4)


def test_state_lies_as_its_parameter(run):
    for name in muon_worker.SHAPES:
        parameter, moment = run[0][f"spec/{name}"]
        assert parameter == moment and "devices" in parameter, name


def test_only_matrices_that_are_cut_are_gathered(run):
    collective = r"= (\S+) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\("
    found = re.findall(collective, run[1])
    assert found and {kind for _, kind in found} == {"all-gather"}
    # q_proj and gate_up_proj, [2, 1, 16, 8] whole, and no expert's [16, 8] or [8, 8].
    assert len(found) == 2
    assert all(shape.startswith("f32[2,1,16,8]") for shape, _ in found), found
