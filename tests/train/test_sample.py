"""Generation from a function of one shape."""

import numpy as np
import pytest

from train.sample import generate

V = 7


def successor(seen: list | None = None):
    """A model that strongly expects last token + 1, from the last position alone."""

    def logits(input_ids, segment_ids):
        if seen is not None:
            seen.append((input_ids.copy(), segment_ids.copy()))
        return 50.0 * np.eye(V)[(input_ids[:, -1] + 1) % V]

    return logits


def test_greedy_continuation_in_every_row():
    text = generate(
        successor(), np.array([3]), length=5, sequence_length=4, batch_size=2, temperature=0
    )
    assert text.dtype == np.int32
    assert text.tolist() == [[3, 4, 5, 6, 0, 1]] * 2


def test_window_has_one_shape_stands_right_and_slides():
    seen = []
    generate(successor(seen), np.array([1, 2]), length=4, sequence_length=4, temperature=0)
    assert {(a.shape, a.dtype, b.shape) for a, b in seen} == {((1, 4), np.dtype("int32"), (1, 4))}
    assert [a[0].tolist() for a, _ in seen] == [
        [0, 0, 1, 2],
        [0, 1, 2, 3],
        [1, 2, 3, 4],
        [2, 3, 4, 5],
    ]
    assert [b[0].tolist() for _, b in seen] == [[0, 0, 1, 1], [0, 1, 1, 1], [1] * 4, [1] * 4]


def test_draws_follow_the_softmax_at_the_temperature():
    logits = np.log(np.array([0.7, 0.2, 0.1]))
    for temperature in (1.0, 0.5):
        text = generate(
            lambda ids, segments: np.tile(logits, (len(ids), 1)),
            np.array([0]),
            length=50,
            sequence_length=8,
            batch_size=400,
            temperature=temperature,
            seed=3,
        )
        expected = np.exp(logits / temperature)
        counts = np.bincount(text[:, 1:].ravel(), minlength=3) / (400 * 50)
        np.testing.assert_allclose(counts, expected / expected.sum(), atol=0.02)


def test_seed_decides():
    def flat(ids, segments):
        return np.zeros((len(ids), V))

    options = {"length": 20, "sequence_length": 4, "batch_size": 2}
    a, b, c = (generate(flat, np.array([1]), seed=s, **options).tolist() for s in (0, 0, 1))
    assert a == b != c
    assert a[0] != a[1]


def test_refusals():
    with pytest.raises(ValueError, match="prompt is empty: give at least one token"):
        generate(successor(), np.array([]), length=1, sequence_length=4)
    with pytest.raises(ValueError, match=r"temperature = -1: give 0"):
        generate(successor(), np.array([1]), length=1, sequence_length=4, temperature=-1)
