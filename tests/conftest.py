"""Shared by all tests: one thread, one XLA device, a deterministic hypothesis, and the folder of
oracle cases."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from train.config import MeshConfig
from train.launch import prepare_environment

REPOSITORY = Path(__file__).parent.parent

settings.register_profile("deterministic", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("deterministic")
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hf-cases",
        type=Path,
        default=REPOSITORY / "../shared/cases/hf",
        help="folder of Hugging Face oracle cases; one sub-folder a case",
    )
    parser.addoption(
        "--compiled-26b",
        type=Path,
        help="report folder of `python -m train compile --preset gemma4_26b_a4b`, instead of "
        "compiling for a quarter of an hour",
    )


def pytest_sessionstart() -> None:
    """The XLA client is up before any test runs a backward pass, on the CPU too: the autograd
    engine counts devices once, at the first one of the process, and fails at XLA tensors if it
    counted none."""
    before = {name: os.environ.get(name) for name in ("CPU_NUM_DEVICES", "XLA_FLAGS")}
    prepare_environment(MeshConfig(platform="cpu", fsdp=1))
    import torch_xla

    torch_xla.device()
    # The client has read them; processes that tests start choose their own number of devices.
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random inputs do not depend on which tests ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def hf_cases(request: pytest.FixtureRequest) -> Path:
    """The folder of oracle cases; skips where it is absent."""
    folder = request.config.getoption("--hf-cases").resolve()
    if not folder.is_dir():
        pytest.skip(f"no oracle cases at {folder}; give their folder with --hf-cases")
    return folder


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Arguments that make a test run once a case folder: `hf_case`, every one with a model, and
    `oracle_case`, those with outputs to compare with."""
    folder = metafunc.config.getoption("--hf-cases").resolve()
    absent = pytest.mark.skip(f"no oracle cases at {folder}; give their folder with --hf-cases")
    for argument, file in {"hf_case": "config.json", "oracle_case": "outputs.safetensors"}.items():
        if argument in metafunc.fixturenames:
            cases = sorted(path.parent for path in folder.glob(f"*/{file}"))
            params = [pytest.param(case, id=case.name) for case in cases]
            params = params or [pytest.param(None, id="none", marks=absent)]
            metafunc.parametrize(argument, params, scope="session")
