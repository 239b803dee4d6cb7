"""Updates that are refused on the device: none of their bits arrives."""

import math

import pytest
import torch
from torch import nn

from train.config import OptimConfig
from train.exit_codes import Diverged
from train.guards import Guards, refuse_to_go_on
from train.optim import AdamW, clip_by_global_norm

CPU = torch.device("cpu")


def taken(guards, norms):
    return [bool(guards.accept(torch.tensor(norm))) for norm in norms]


def counts(guards):
    return {name: int(value) for name, value in guards.metrics().items()}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_and_counted(bad):
    guards = Guards(OptimConfig(), CPU)
    assert taken(guards, [1.0, bad, bad, 1e30]) == [True, False, False, True]
    assert counts(guards) == {"skipped_updates": 2, "skipped_in_a_row": 0}
    assert taken(guards, [bad, bad, bad]) == [False] * 3
    assert counts(guards) == {"skipped_updates": 5, "skipped_in_a_row": 3}


def test_an_outlier_is_refused_once_there_are_enough_norms_to_tell():
    guards = Guards(OptimConfig(skip_outliers=6.0, outlier_window=8), CPU)
    usual = [1.0, 1.1, 0.9, 1.0]
    assert all(taken(guards, [100.0, *usual]))  # too early to tell
    assert all(taken(guards, [*usual, *usual]))  # which forgets the 100
    mean, deviation = 1.0, math.sqrt(0.005)
    below, above = mean + 5.5 * deviation, mean + 6.5 * deviation
    assert taken(guards, [above, 1.0]) == [False, True]
    assert counts(guards)["skipped_updates"] == 1
    other = Guards(OptimConfig(skip_outliers=6.0, outlier_window=8), CPU)
    assert all(taken(other, [*usual, *usual, below]))


def test_a_lasting_change_of_level_is_accepted_in_the_end():
    guards = Guards(OptimConfig(skip_outliers=6.0, outlier_window=8), CPU)
    taken(guards, [1.0, 1.1] * 8)
    after = taken(guards, [30.0, 31.0] * 4)
    assert not after[0] and all(after[2:])


def test_a_norm_that_is_not_finite_is_no_measure_for_others():
    guards = Guards(OptimConfig(skip_outliers=6.0, outlier_window=4), CPU)
    assert taken(guards, [1.0, 1.1, math.nan, 0.9, 1.0, math.inf, 50.0, 1.0]) == [
        *(True, True, False, True, True, False, False, True)
    ]


def test_without_outliers_nothing_but_finiteness_counts():
    guards = Guards(OptimConfig(outlier_window=2), CPU)
    assert all(taken(guards, [1.0, 1.0, 1.0, 1e9]))


def test_a_refused_update_changes_no_bit_and_the_next_one_is_as_if_it_had_not_been():
    config = OptimConfig(learning_rate=0.1, warmup_steps=2)

    def trained(bad_step):
        torch.manual_seed(0)
        parameters = {name: nn.Parameter(torch.randn(3, 4)) for name in ("a.weight", "b.weight")}
        optimizer = AdamW(parameters, config, 10, decays=lambda name: True)
        torch.manual_seed(1)
        for step in range(4):
            if step == bad_step:
                before = {n: t.clone() for n, t in (parameters | optimizer.state()).items()}
                for parameter in parameters.values():
                    parameter.grad = torch.full((3, 4), 3.0)
                parameters["b.weight"].grad[1, 2] = math.nan
            else:
                for parameter in parameters.values():
                    parameter.grad = torch.randn(3, 4)
            norm = clip_by_global_norm([p.grad for p in parameters.values()], 1.0)
            rate = optimizer.step(optimizer.guards.accept(norm))
            assert torch.isfinite(rate)
            if step == bad_step:
                for name, tensor in (parameters | optimizer.state()).items():
                    if not name.startswith("guards/"):
                        assert torch.equal(tensor, before[name]), name
        return parameters, optimizer

    for bad_step in (0, 2):
        torch.manual_seed(1)
        parameters, optimizer = trained(bad_step)
        assert optimizer.num_updates == 3 and optimizer.guards.num_skipped == 1
        assert all(bool(torch.isfinite(p).all()) for p in parameters.values())
        torch.manual_seed(0)
        clean = {name: nn.Parameter(torch.randn(3, 4)) for name in ("a.weight", "b.weight")}
        reference = AdamW(clean, config, 10, decays=lambda name: True)
        torch.manual_seed(1)
        for _ in range(3):
            for parameter in clean.values():
                parameter.grad = torch.randn(3, 4)
            clip_by_global_norm([p.grad for p in clean.values()], 1.0)
            reference.step()
        assert all(torch.equal(parameters[name], clean[name]) for name in clean)


def test_bf16_parameters_keep_their_bits_too():
    parameter = nn.Parameter(torch.randn(5).bfloat16())
    before = parameter.detach().clone()
    optimizer = AdamW({"w": parameter}, OptimConfig(), 5, decays=lambda name: False)
    parameter.grad = torch.full((5,), math.inf).bfloat16()
    optimizer.step(torch.tensor(False))
    assert torch.equal(parameter, before) and parameter.dtype == torch.bfloat16


def test_too_many_in_a_row_end_the_run():
    config = OptimConfig(abort_after=3)
    row = {"grad_norm": math.nan, "loss": 2.5, "skipped_in_a_row": 2.0}
    refuse_to_go_on(9, row, config)
    message = r"diverged: the last 3 updates, up to step 10, were skipped .* \(norm nan, loss 2\.5;"
    with pytest.raises(Diverged, match=message):
        refuse_to_go_on(10, row | {"skipped_in_a_row": 3.0}, config)
