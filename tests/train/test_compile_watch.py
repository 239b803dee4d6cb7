"""Only the training step's own compilations count against it."""

import numpy as np
import pytest
import torch

from train.compile_watch import CompileWatch


def batch_of(*shape):
    return {"input_ids": np.zeros((3, 5), np.int32), "labels": np.zeros(shape, np.int32)}


def run(*shape, factor=1):
    """A program on the real device: one a shape (and a Python number)."""
    (torch.zeros(shape).to("xla") * 3).sum(dim=0, keepdim=factor > 1).cpu()


def step(watch, number, *shape, factor=1):
    with watch.training_step(number, batch_of(*shape)):
        run(*shape, factor=factor)


def test_steps_of_one_shape_compile_once_and_another_shape_is_an_error():
    watch = CompileWatch()
    before, seconds = watch.count, watch.seconds
    for number in range(1, 6):
        step(watch, number, 7, 1013)
    assert watch.count == before + 1
    assert 0 < watch.seconds - seconds < 10
    message = (
        rf"step 6 compiled the training step again \({before + 2} compilations\). "
        r"Changed shapes: labels \(7, 1013\) -> \(7, 1014\)$"
    )
    with pytest.raises(RuntimeError, match=message):
        step(watch, 6, 7, 1014)


def test_a_program_that_changed_under_equal_shapes_says_so():
    watch = CompileWatch()
    for number in range(1, 4):
        step(watch, number, 7, 1015)
    with pytest.raises(RuntimeError, match="shapes: none: a Python number became part of the prog"):
        step(watch, 4, 7, 1015, factor=2)


def test_the_first_two_steps_of_a_process_may_compile_wherever_it_goes_on():
    watch = CompileWatch()
    step(watch, 101, 7, 1016)
    step(watch, 102, 7, 1017)
    with pytest.raises(RuntimeError, match=r"step 103 .* labels \(7, 1016\) -> \(7, 1018\)"):
        step(watch, 103, 7, 1018)


def test_other_programs_compile_when_they_like():
    """Two evaluations of different shapes, each after training steps, are no recompiled step."""
    watch = CompileWatch()
    for number in range(1, 4):
        step(watch, number, 7, 1019)
    for number, length in ((4, 1020), (5, 1021)):
        run(7, length)
        step(watch, number, 7, 1019)


def test_an_error_of_the_step_is_not_covered_up():
    watch = CompileWatch()
    with pytest.raises(ZeroDivisionError), watch.training_step(1, {}):
        raise ZeroDivisionError
