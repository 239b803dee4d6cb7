"""`info`: golden numbers, as tables and as JSON, without a device."""

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from train.info import collect_info, print_info
from train.presets import cpu_tiny, gemma4_26b_a4b


@pytest.fixture(scope="module")
def reference():
    return collect_info(gemma4_26b_a4b())


def test_reference_parameters_and_flops(reference):
    assert reference["parameters"]["total"]["total"] == 25_233_141_790
    assert round(reference["parameters"]["total"]["active"] / 1e9, 2) == 3.82
    assert round(reference["flops_per_chip"]["total"]["training"] / 1e12, 3) == 923.287
    assert reference["tokens_per_step"] == 4_194_304


def test_sharding_table_agrees_with_the_state(reference):
    by_table = sum(row["bytes_per_chip"] for row in reference["sharding"])
    assert by_table == pytest.approx(reference["bytes_per_chip"]["parameters"], rel=1e-3)
    assert len({row["parameter"] for row in reference["sharding"]}) == len(reference["sharding"])


def test_tables_name_every_part_and_parameter():
    info = collect_info(cpu_tiny())
    console = Console(file=io.StringIO(), width=200)
    print_info(cpu_tiny(), console=console)
    text = console.file.getvalue()
    for name in (*info["parameters"], *info["flops_per_chip"]):
        assert name in text
    for row in info["sharding"]:
        assert row["parameter"] in text
    assert f"{info['parameters']['total']['total']:,}" in text


def test_json_alone_and_without_torch_xla():
    code = (
        "import sys\n"
        "from train.__main__ import main\n"
        "main(['info', '--preset', 'gemma4_26b_a4b', '--mesh.fsdp', '64', '--json'])\n"
        "assert 'torch_xla' not in sys.modules and 'jax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert info["mesh"] == {"data": 1, "fsdp": 64}
    assert info["parameters"]["total"]["total"] == 25_233_141_790
