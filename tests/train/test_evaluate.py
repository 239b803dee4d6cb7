"""Held-out loss is a mean over tokens, not over batches."""

import math

import numpy as np
import pytest

from train.data import EvalSet
from train.evaluate import Evaluation, evaluate


def test_every_token_weighs_the_same():
    batches = [{"labels": np.zeros((1, n))} for n in (30, 10, 0)]
    losses = {30: 1.0, 10: 3.0, 0: math.nan}  # a batch without a valid token has no mean
    data = EvalSet(batches, bytes_per_token=4.0)
    result = evaluate(lambda b: (losses[b["labels"].size], b["labels"].size), data)
    assert result.loss == pytest.approx(1.5)
    assert result.num_tokens == 40
    assert result.bits_per_byte == pytest.approx(1.5 / math.log(2) / 4)
    assert result.metrics() == {"eval_loss": 1.5, "eval_bits_per_byte": result.bits_per_byte}


def test_what_is_no_text_has_no_bits_a_byte():
    assert Evaluation(2.0, 3, math.nan).metrics() == {"eval_loss": 2.0}


def test_values_are_read_after_the_last_batch_was_sent():
    log = []

    class OnDevice(float):
        def __float__(self):
            log.append("read")
            return 1.0

    def loss(batch):
        log.append("send")
        return OnDevice(), OnDevice()

    evaluate(loss, EvalSet([{}, {}], 1.0))
    assert log[:2] == ["send", "send"] and "send" not in log[2:]
