"""Generation from a function of one shape."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.train.data.helpers import word_tokenizer
from train.config import SampleConfig
from train.data.config import TokenizerConfig
from train.data.tokenizer import FileTokenizer
from train.presets import cpu_tiny
from train.sample import Sampler, generate

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


def test_ids_that_the_tokenizer_has_not_are_never_drawn():
    text = generate(
        lambda ids, segments: np.tile(np.arange(V) * 30.0, (len(ids), 1)),
        np.array([0]),
        length=8,
        sequence_length=4,
        batch_size=3,
        vocab_size=4,
    )
    assert text.max() == 3


def sampler_of(tmp_path, logits, **fields):
    """A sampler with the word tokenizer, on a mesh of two row shards that is none."""
    sample = SampleConfig(**{"prompt": "a one", "length": 5, "temperature": 0} | fields)
    config = replace(cpu_tiny(), sample=sample, steps=10)
    mesh = SimpleNamespace(num_row_shards=2, place_batch=lambda batch: batch)
    path = word_tokenizer(tmp_path / "t.json")
    tokenizer = FileTokenizer(TokenizerConfig(path=str(path)))
    return Sampler(config, tokenizer, mesh, logits)


def test_a_text_begins_with_the_begin_token_and_stops_at_the_end_token(tmp_path):
    shapes, windows = set(), []

    def logits(input_ids, segment_ids):
        shapes.add((input_ids.shape, segment_ids.shape))
        windows.append(input_ids[0][segment_ids[0] == 1].tolist())
        following = {6: 7, 7: 8, 8: 1, 1: 3}  # one two three <eos> a ...
        values = np.zeros((2, 300))
        values[:, [following.get(int(input_ids[0, -1]), 2), 299]] = [5, 9]  # 299: no such token
        return torch.tensor(values)

    sampler = sampler_of(tmp_path, logits)
    assert sampler() == sampler() == "a one two three"
    assert windows[0] == [0, 3, 6]
    assert shapes == {((2, 128), (2, 128))}


def test_when_a_sample_is_due(tmp_path):
    due = [step for step in range(1, 11) if sampler_of(tmp_path, None, every=4).is_due(step)]
    assert due == [4, 8, 10]
    assert [s for s in range(1, 11) if sampler_of(tmp_path, None).is_due(s)] == [10]
    assert not sampler_of(tmp_path, None, length=0, every=1).is_due(10)
