"""Attention of a step from static schedules: one small layer is really compiled."""

import tempfile

import pytest

from benchmarks.attention import LAYERS, ours, rows_of, splash, totals
from pallas_ops.attention.shapes import AttentionShape

SMALL = AttentionShape("local", 1, 512, 2, 1, 128, 128)


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_small_layer_end_to_end(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = list(rows_of(ours(SMALL)))
    assert list(tmp_path.iterdir()) == []  # dumps are deleted
    forward, backward = rows
    assert (forward["kernel"], backward["kernel"]) == ("attention_band", "attention_band_backward")
    for row, runs in ((forward, 2), (backward, 1)):
        assert row["runs_a_step"] == runs * LAYERS["local"] and not row["is_upper_bound"]
        assert row["step_s"] == pytest.approx(row["runs_a_step"] * row["est_us"] / 1e6, rel=0.2)
        # Each query block of 128 meets two key blocks, so a little more than the window is done.
        assert row["ideal_tflop"] <= row["mxu_tflop"] + 1e-3
        assert 0 < row["mxu_occupancy"] < 1 and row["est_us"] > 0
    assert forward["num_steps"] == 4 and backward["num_steps"] == 4 + 1
    total = forward["step_s"] + backward["step_s"]
    assert totals(rows) == {"ours": pytest.approx(total, abs=1e-4)}


def test_splash_has_a_forward_call_and_two_backward():
    variant = splash(AttentionShape("local", 1, 512, 2, 1, 128, 128), 256, 128)
    assert variant.name == "splash 256/128"
    assert (len(variant.forward), len(variant.backward)) == (1, 2)
    assert "fwd" in variant.forward[0].name
    assert ["dkv" in variant.backward[0].name, "dq" in variant.backward[1].name] == [True, True]
