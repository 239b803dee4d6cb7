"""Batches of a corpus: their order, their place after a restart, their rows on several hosts."""

import json
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest

from tests.train.data.helpers import config_of, word_tokenizer, write_lines
from train.config import DataConfig
from train.data import IGNORED, HostRows, TextData
from train.data.batches import restarted_positions
from train.data.config import TokenizerConfig
from train.data.synthetic import SyntheticSequences


def load(corpus, **fields) -> TextData:
    return TextData.load(config_of(corpus, **fields), vocab_size=256)


def lists(batch):
    return {name: array.tolist() for name, array in batch.items()}


def rows(batches):
    return [row for batch in batches for row in batch["input_ids"].tolist()]


# Order


def test_batches_are_a_function_of_seed_and_number(corpus):
    whole = list(islice(load(corpus).train_batches(), 12))
    again = list(islice(load(corpus).train_batches(), 12))
    assert [lists(b) for b in whole] == [lists(b) for b in again]
    assert all(v.shape == (4, 16) and v.dtype == np.int32 for b in whole for v in b.values())
    other = next(load(corpus, seed=1).train_batches())
    assert other["input_ids"].tolist() != whole[0]["input_ids"].tolist()


def test_an_epoch_holds_every_sequence_once_and_epochs_differ(corpus):
    data = load(corpus, batch_size=1)
    n = len(data.train.sequences)
    drawn = [tuple(row) for row in rows(islice(data.train_batches(), 2 * n))]
    everything = sorted(tuple(data.train.sequences[i]["input_ids"]) for i in range(n))
    assert sorted(drawn[:n]) == sorted(drawn[n:]) == everything
    assert drawn[:n] != drawn[n:]


# State


def test_state_is_the_next_sample_whatever_was_made_ahead(corpus):
    batches = load(corpus, prefetch=8).train_batches()
    assert batches.state_dict()["next_sample"] == 0
    for number in range(1, 4):
        next(batches)
        assert batches.state_dict()["next_sample"] == 4 * number
    batches.close()


@pytest.mark.parametrize("packing", ["split", "fit"])
@pytest.mark.parametrize(("batch_size", "num_hosts"), [(4, 1), (8, 4), (2, 2), (6, 3)])
def test_another_mesh_goes_on_exactly(corpus, packing, batch_size, num_hosts):
    """12 samples are read with a batch of 4 on one host; then any batch, on any hosts, across the
    end of an epoch."""
    before = load(corpus, packing=packing)
    batches = before.train_batches()
    list(islice(batches, 3))
    state = json.loads(json.dumps(batches.state_dict()))
    num_batches = 3 + len(before.train.sequences) // 4
    expected = rows(islice(batches, num_batches))

    hosts = []
    for index in range(num_hosts):
        after = load(corpus, packing=packing, batch_size=batch_size)
        own = after.train_batches(HostRows.of_process(index, num_hosts))
        own.load_state_dict(state)
        hosts.append(own)
    got = []
    for _ in range(num_batches * 4 // batch_size):
        made = [next(host)["input_ids"] for host in hosts]
        size = batch_size // num_hosts
        got += [made[r // size][r].tolist() for r in range(batch_size)]
    assert got == expected[: len(got)]


CHANGES = {
    "seed": ({"seed": 3}, r"data\.seed = 3: the checkpoint's data has 0, so its position"),
    "length": (
        {"sequence_length": 32},
        r"data\.sequence_length = 32: the checkpoint's data has 16",
    ),
    "packing": ({"packing": "fit"}, r"data\.packing = 'fit': the checkpoint's data has 'split'"),
    "text": ({"skip": ("part0",)}, r"data\.num_tokens = \d+: the checkpoint's data has \d+"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_of_other_data_is_refused(corpus, name):
    fields, message = CHANGES[name]
    state = load(corpus).train_batches().state_dict()
    with pytest.raises(ValueError, match=message):
        load(corpus, **fields).train_batches().load_state_dict(state)


def test_a_changed_letter_is_other_data(corpus):
    state = load(corpus, eval_fraction=0).train_batches().state_dict()
    file = corpus / "part1" / "13.py"
    file.write_text(file.read_text().replace("x13 = 13", "x13 = 23"))
    with pytest.raises(ValueError, match=r"data\.digest = '\w+': the checkpoint's data has '\w+'"):
        load(corpus, eval_fraction=0).train_batches().load_state_dict(state)


# Hosts


class Spy:
    """Sequences that keep the numbers of those read, in order (one thread of grain's reads)."""

    def __init__(self, sequences):
        self.sequences, self.read = sequences, []

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        self.read.append(index)
        return self.sequences[index]


def test_a_host_reads_its_own_rows_and_no_others(corpus):
    data = load(corpus, batch_size=8, prefetch=1)
    sequences = data.train.sequences

    def first_batch(rows):
        data.train.sequences = spy = Spy(sequences)
        batches = data.train_batches(rows)
        batch = next(batches)
        batches.close()
        return batch, spy.read

    whole, every = first_batch(HostRows())
    batch, read = first_batch(HostRows(parts=(3, 1), num_parts=4))  # no two next to each other
    mine = [2, 3, 6, 7]
    assert read[:4] == [every[row] for row in mine]
    # Batches are made ahead, and the last may have been left half made.
    assert len(set(read)) == len(read) <= 4 * 3
    for name, array in batch.items():
        assert array.shape == (8, 16)
        assert array[mine].tolist() == whole[name][mine].tolist()
        assert (array[[0, 1, 4, 5]] == (IGNORED if name == "labels" else 0)).all()


def test_rows_that_do_not_divide():
    with pytest.raises(
        ValueError, match=r"data\.batch_size = 6: give a multiple of 4, the devices"
    ):
        HostRows.of_process(0, 4).of(6)


# What a batch holds


def test_a_token_that_the_model_has_not_is_refused_on_the_host(corpus):
    data = TextData.load(config_of(corpus), vocab_size=256)
    object.__setattr__(data, "vocab_size", 100)
    message = r"a batch holds token 12\d, and model\.vocab_size = 100: the tokens were made for ano"
    with pytest.raises(ValueError, match=message):
        next(data.train_batches())
    with pytest.raises(ValueError, match=message):
        data.eval_set(1)


def test_positions_restart_with_every_document(corpus):
    segments = np.array([[1, 1, 1, 2, 3, 3, 0, 0], [1] * 8])
    assert restarted_positions(segments).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [*range(8)]]
    data = load(corpus, restart_positions=True)
    batch = next(data.train_batches())
    assert tuple(batch) == data.config.batch_arrays
    assert batch["positions"].dtype == np.int32
    assert (batch["positions"][batch["labels"] != IGNORED] > 0).all()


def test_prompts_carry_no_loss(tmp_path):
    pairs = [{"prompt": f"{i} and ", "completion": f"{i + 1}."} for i in range(20)]
    lines = write_lines(tmp_path / "a.jsonl", *pairs)
    data = load(lines, packing="fit", eval_fraction=0, sequence_length=24)
    batch = next(data.train_batches())
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        text = bytes(ids.tolist()).rstrip(b"\0").split(b"\0")
        answers = [document.partition(b" and ")[2] + b"\0" for document in text]
        assert bytes(labels[labels != IGNORED].tolist()) == b"".join(answers)


# Held out


def test_eval_batches_are_fixed_and_filled_up_with_rows_that_do_not_count(corpus):
    data = load(corpus)
    batches = data.eval_set(10_000).batches
    used = [row for b in batches for row in b["segment_ids"] if row.any()]
    assert len(used) == len(data.held_out(10_000).sequences)
    assert all(v.shape == (4, 16) for b in batches for v in b.values())
    empty = batches[-1]["segment_ids"].max(axis=1) == 0
    assert empty.any() and (batches[-1]["labels"][empty] == IGNORED).all()
    again = data.eval_set(1).batches
    assert len(again) == 1
    assert again[0]["input_ids"].tolist() == batches[0]["input_ids"].tolist()


def test_hosts_share_the_evaluation(corpus):
    data = load(corpus)
    whole = data.eval_set(10_000).batches
    halves = [data.eval_set(10_000, HostRows.of_process(i, 2)).batches for i in range(2)]
    assert len(halves[0]) == len(halves[1]) == len(whole)
    for batch, first, second in zip(whole, *halves, strict=True):
        for name, array in batch.items():
            assert array.tolist() == first[name][:2].tolist() + second[name][2:].tolist()


def test_eval_without_held_out_text(corpus):
    with pytest.raises(ValueError, match=r"data\.eval_fraction = 0 holds no text out"):
        load(corpus, eval_fraction=0).eval_set(1)


# Sources


def test_text_shorter_than_a_sequence(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ValueError, match=r"data\.sequence_length = 16: the training text has 6 to"):
        load(tmp_path / "a.txt", eval_fraction=0)


def test_files_through_a_tokenizer(tmp_path):
    tokenizer = TokenizerConfig(path=str(word_tokenizer(tmp_path / "t.json")))
    pair = {"prompt": "a", "completion": "b"}
    lines = write_lines(tmp_path / "a.jsonl", {"text": "a b c one"}, pair)
    config = config_of(
        lines, tokenizer=tokenizer, sequence_length=6, batch_size=2, packing="fit", eval_fraction=0
    )
    batch = next(TextData.load(config, vocab_size=9).train_batches())
    found = sorted(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True))
    assert found == [
        ([0, 3, 4, 1, 0, 0], [-100, -100, 4, 1, -100, -100]),
        ([0, 3, 4, 5, 6, 1], [-100, 3, 4, 5, 6, 1]),
    ]
    with pytest.raises(ValueError, match=r"it has 9 ids, and model\.vocab_size = 8"):
        TextData.load(config, vocab_size=8)


def test_synthetic_data_has_a_known_answer():
    config = DataConfig(source="synthetic", sequence_length=64, batch_size=4)
    data = TextData.load(config, vocab_size=50)
    assert data.tokenizer is None
    batches = [next(data.train_batches()), *data.eval_set(2).batches]
    assert len({b["input_ids"].tobytes() for b in batches}) == 3
    ids = np.concatenate([b["input_ids"] for b in batches])
    assert ids.min() >= 0 and ids.max() < 50
    share = (ids[:, 1:] == (5 * ids[:, :-1] + 1) % 50).mean()
    assert share == pytest.approx(0.9 + 0.1 / 50, abs=0.03)
    # The entropy of "right with this probability, else any of the others", summed out.
    shares = np.array([0.902] + [0.002] * 49)
    least = SyntheticSequences(1, 64, 50, 0).least_loss
    assert least == pytest.approx(-(shares * np.log(shares)).sum())


def test_default_corpus_is_the_standard_library():
    data = TextData.load(DataConfig(), vocab_size=256)
    assert data.train.order["num_tokens"] > 5_000_000
    held_out = data.eval_set(10)
    assert len(held_out.batches) == 10
    assert held_out.bytes_per_token == pytest.approx(1, abs=1e-3)
    first = data.tokenizer.decode(next(data.train_batches())["input_ids"][0])
    assert first.isprintable() or "\n" in first


def test_data_starts_no_device():
    code = (
        "import sys\n"
        "from train.config import DataConfig\n"
        "from train.data import TextData\n"
        "data = TextData.load(DataConfig(), vocab_size=256)\n"
        "assert 'jax' not in sys.modules, 'jax before it is needed'\n"
        "next(data.train_batches())\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'a backend was started'\n"
        "assert 'torch_xla' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
