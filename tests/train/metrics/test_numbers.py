"""What is worked out on the host: expert load, rates, memory."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from train.config import MeshConfig
from train.metrics import Rates, expert_load_metrics, host_memory
from train.metrics.device_memory import DeviceMemory
from train.metrics.experts import heat_map
from train.presets import cpu_tiny, gemma4_26b_a4b

LOAD = np.array([[4.0, 4, 4, 4], [16, 0, 0, 0], [2, 6, 4, 4]])


def test_expert_load():
    assert expert_load_metrics(LOAD) == {
        "expert_load_max": 4.0,
        "expert_load_min": 0.0,
        "dead_experts": 3,
    }


def test_a_batch_of_padding_alone_loads_no_expert():
    assert expert_load_metrics(np.zeros((1, 4))) == {
        "expert_load_max": 0.0,
        "expert_load_min": 0.0,
        "dead_experts": 4,
    }


def test_the_heat_map_tells_balance_overload_and_death_apart():
    def num_of(pixels, colour):
        return int((pixels == colour).all(axis=2).sum())

    pixels, balanced = heat_map(LOAD, step=7), heat_map(np.full((3, 4), 4.0), step=7)
    assert pixels.dtype == np.uint8 and pixels.shape[2] == 3
    assert pixels.shape == balanced.shape
    even = (221, 220, 219)  # the middle of matplotlib's coolwarm
    cell = num_of(balanced, even) / 12
    assert cell > 400
    assert round(num_of(pixels, even) / cell) == 6
    # The letters are black in both.
    assert round((num_of(pixels, (0, 0, 0)) - num_of(balanced, (0, 0, 0))) / cell) == 3


def test_a_large_model_s_picture_has_bounded_size():
    height, width, _ = heat_map(np.ones((60, 512)), step=1).shape
    assert height <= 1200 and width <= 1600


def test_rates_of_the_26b_are_the_golden_count_over_the_peak():
    rates = Rates.of(gemma4_26b_a4b())
    assert rates.tokens_per_step == 256 * 16_384
    # 923.287 TFLOP a chip and step (tests/torch_gemma4/test_accounting.py); v6e: 918 TFLOP/s.
    metrics = rates.metrics(2.0)
    assert metrics["tflops_per_chip"] == pytest.approx(923.287 / 2, abs=1e-3)
    assert metrics["mfu"] == pytest.approx(923.287 / 2 / 918, abs=1e-5)
    assert metrics["tokens_per_s"] == 128 * 16_384


def test_rates_are_of_one_chip_and_a_cpu_has_no_peak():
    one, four = (
        Rates.of(replace(cpu_tiny(), mesh=MeshConfig(fsdp=n))).metrics(1.0) for n in (1, 4)
    )
    assert "mfu" not in one
    assert one["tokens_per_s"] == four["tokens_per_s"] == 16 * 128
    assert one["tflops_per_chip"] == pytest.approx(4 * four["tflops_per_chip"])


def test_host_memory(tmp_path):
    before = host_memory()["host_memory_bytes"]
    held = np.ones(1 << 24)  # 128 MiB
    assert 100e6 < host_memory()["host_memory_bytes"] - before < 200e6
    assert held.all()
    assert host_memory(tmp_path / "none") == {}


def usage(memory):
    return SimpleNamespace(memory_usage=memory, total_memory=100)


def test_device_memory_is_that_of_the_fullest_chip(monkeypatch):
    answers = [[usage(3), usage(7)], RuntimeError("connection refused"), [usage(1)]]

    def get_chip_usage(chip):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    package = ModuleType("tpu_info")
    package.device = SimpleNamespace(get_local_chips=lambda: ("v6e", 4))
    package.metrics = SimpleNamespace(get_chip_usage=get_chip_usage)
    monkeypatch.setitem(sys.modules, "tpu_info", package)
    told = []
    memory = DeviceMemory("tpu", told.append)
    assert memory() == {"device_memory_bytes": 7.0, "device_memory_limit_bytes": 100.0}
    assert not told
    assert memory() == memory() == {}  # told once, not asked again
    assert len(answers) == 1
    assert told == [
        "no device memory among the metrics: RuntimeError: connection refused (pip install -e "
        "'.[tpu]'; the command tpu-info shows whether the service answers)"
    ]
    assert DeviceMemory("cpu", told.append)() == {} and len(told) == 1
