"""The learning rate against closed forms, at the edges of each phase."""

import math

import pytest
import torch

from train.config import OptimConfig
from train.schedule import learning_rate

SCHEDULES = ["cosine", "linear", "wsd", "constant"]


def rates(config, num_steps, steps):
    return learning_rate(torch.tensor(steps), config, num_steps).tolist()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [1, 4])
def test_warm_up_rises_in_equal_steps_to_the_peak(schedule, warmup):
    config = OptimConfig(learning_rate=0.5, warmup_steps=warmup, schedule=schedule)
    steps = list(range(warmup + 1))
    assert rates(config, 1000, steps) == pytest.approx([0.5 * step / warmup for step in steps])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warm_up_the_first_step_is_at_the_peak(schedule):
    config = OptimConfig(learning_rate=0.5, warmup_steps=0, schedule=schedule)
    assert rates(config, 10**6, [1]) == pytest.approx([0.5], rel=1e-6)


def test_constant_stays_at_the_peak():
    config = OptimConfig(learning_rate=0.5, warmup_steps=3, schedule="constant")
    assert rates(config, 10, [3, 4, 10, 1000]) == [0.5] * 4


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_cosine_passes_its_middle_and_ends_at_the_ratio(ratio):
    config = OptimConfig(learning_rate=2.0, warmup_steps=10, schedule="cosine", min_lr_ratio=ratio)
    quarter = ratio + (1 - ratio) * 0.5 * (1 + math.sqrt(0.5))
    expected = [2.0, 2 * quarter, 1 + ratio, 2 * ratio, 2 * ratio]
    # The last step is the end; beyond it nothing falls further.
    assert rates(config, 50, [10, 20, 30, 50, 60]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_linear_falls_from_warm_up_to_the_last_step(ratio):
    config = OptimConfig(learning_rate=2.0, warmup_steps=10, schedule="linear", min_lr_ratio=ratio)
    expected = [2.0, 2 - 0.5 * (1 - ratio), 1 + ratio, 2 * ratio, 2 * ratio]
    assert rates(config, 50, [10, 20, 30, 50, 60]) == pytest.approx(expected, abs=1e-6)


def test_wsd_is_constant_until_its_last_share_of_the_steps():
    config = OptimConfig(
        learning_rate=2.0, warmup_steps=10, schedule="wsd", min_lr_ratio=0.1, decay_share=0.2
    )
    assert rates(config, 100, [5, 10, 79, 80]) == [1.0, 2.0, 2.0, 2.0]
    expected = [2 * (0.1 + 0.9 * 19 / 20), 2 * (0.1 + 0.9 / 2), 0.2, 0.2]
    assert rates(config, 100, [81, 90, 100, 101]) == pytest.approx(expected)


@pytest.mark.parametrize(("share", "same_as"), [(0.0, "constant"), (1.0, "linear")])
def test_wsd_at_both_ends_of_its_share(share, same_as):
    config = OptimConfig(warmup_steps=10, schedule="wsd", decay_share=share)
    other = OptimConfig(warmup_steps=10, schedule=same_as)
    steps = [*range(101)]
    assert rates(config, 100, steps) == rates(other, 100, steps)


def test_wsd_does_not_fall_before_it_has_risen():
    config = OptimConfig(learning_rate=1.0, warmup_steps=6, schedule="wsd", decay_share=0.9)
    assert rates(config, 10, [3, 6, 8, 10]) == pytest.approx([0.5, 1.0, 0.55, 0.1])


def test_the_rate_does_not_jump():
    """Neither where phases meet nor at the end: no step changes it by more than its slope."""
    for schedule in SCHEDULES:
        config = OptimConfig(learning_rate=1.0, warmup_steps=50, schedule=schedule)
        found = torch.tensor(rates(config, 1000, [*range(1101)]))
        assert found.diff().abs().max() <= 1 / 50 + 1e-6, schedule


def test_a_schedule_that_is_all_warm_up_has_no_division_by_zero():
    config = OptimConfig(learning_rate=1.0, warmup_steps=4)
    assert rates(config, 4, [2, 4]) == pytest.approx([0.5, 1.0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rate_is_a_float32_tensor_computed_from_a_tensor(schedule):
    config = OptimConfig(schedule=schedule)
    step = torch.tensor(7, dtype=torch.int32)
    rate = learning_rate(step, config, 100)
    assert rate.dtype == torch.float32 and rate.shape == ()
    assert learning_rate(step.to("meta"), config, 100).device.type == "meta"  # no value is read
    assert step == 7


def test_a_run_shorter_than_its_warm_up_only_rises():
    config = OptimConfig(learning_rate=1.0, warmup_steps=10, schedule="cosine")
    assert rates(config, 5, [1, 5]) == pytest.approx([0.1, 0.5])
