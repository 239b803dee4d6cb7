"""Streams of a data set, with a stand-in for the datasets library (an extra that tests do not need;
the real one has the same calls)."""

import json
import sys
from itertools import islice
from types import ModuleType

import numpy as np
import pytest

from train.config import DataConfig
from train.data import HostRows, TextData
from train.data.config import HuggingFaceConfig
from train.data.tokenize import tokenize


class Rows:
    """IterableDataset as far as it is used; tells which rows were read."""

    def __init__(self, rows, read, order=None, num_shards=1):
        self.rows, self.read, self.order, self.epoch = rows, read, order, 0
        self.num_shards = num_shards

    def shard(self, num_shards, index):
        assert self.num_shards >= num_shards
        size = len(self.rows) // num_shards
        return Rows(self.rows[index * size : (index + 1) * size], self.read)

    def shuffle(self, seed, buffer_size):
        return Rows(self.rows, self.read, (seed, buffer_size))

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.arange(len(self.rows))
        if self.order:
            order = np.random.default_rng((self.order[0], self.epoch)).permutation(order)
        for i in order:
            self.read.append(self.rows[i]["text"])
            yield self.rows[i]


@pytest.fixture
def opened(monkeypatch):
    """Texts read from the data set named "stories", which has two splits."""
    module, distributed = ModuleType("datasets"), ModuleType("datasets.distributed")
    module.exceptions = ModuleType("datasets.exceptions")
    module.exceptions.DatasetsError = type("DatasetsError", (Exception,), {})
    splits = {
        "train": [{"text": f"story {i} " * (1 + i % 4)} for i in range(60)],
        "validation": [{"text": f"held out {i}"} for i in range(30)],
    }
    read = []

    def load_dataset(name, subset, *, split, data_files, streaming):
        assert streaming and subset is None and data_files is None
        if name != "stories":
            raise module.exceptions.DatasetsError("no such data set")
        return Rows(splits[split], read)

    def split_dataset_by_node(dataset, rank, world_size):
        return Rows(dataset.rows[rank::world_size], read)

    module.load_dataset = load_dataset
    distributed.split_dataset_by_node = split_dataset_by_node
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setitem(sys.modules, "datasets.distributed", distributed)
    return read


def config_of(batch_size=4, prefetch=1, sequence_length=16, **stream):
    stream = {"name": "stories", "eval_split": "validation", "lanes": 4, **stream}
    return DataConfig(
        source="huggingface",
        huggingface=HuggingFaceConfig(**stream),
        batch_size=batch_size,
        prefetch=prefetch,
        sequence_length=sequence_length,
    )


def load(**fields):
    return TextData.load(config_of(**fields), vocab_size=256)


def rows_of(batches, number):
    rows = [row for batch in islice(batches, number) for row in batch["input_ids"].tolist()]
    batches.close()
    return rows


@pytest.mark.parametrize(("batch_size", "num_hosts"), [(4, 2), (8, 2), (2, 1)])
def test_hosts_and_batches_do_not_change_the_samples_nor_a_resumed_run(
    opened, batch_size, num_hosts
):
    expected = rows_of(load().train_batches(), 30)
    first = load().train_batches()
    list(islice(first, 4))
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    assert state["next_sample"] == 16
    hosts = []
    for index in range(num_hosts):
        own = load(batch_size=batch_size).train_batches(HostRows.of_process(index, num_hosts))
        own.load_state_dict(state)
        hosts.append(rows_of(own, 32 // batch_size))
    size = batch_size // num_hosts
    got = [hosts[i % batch_size // size][i] for i in range(32)]
    assert got == expected[16:48]


@pytest.mark.parametrize(("num_files", "lane_of"), [(1, lambda i: i % 4), (4, lambda i: i // 15)])
def test_a_host_reads_its_lanes_and_no_others(opened, monkeypatch, num_files, lane_of):
    """A lane is every fourth row of one file, or a file where there are four."""
    monkeypatch.setattr(Rows.__init__, "__defaults__", (None, num_files))
    own = load().train_batches(HostRows.of_process(1, 2))
    rows_of(own, 10)
    assert {lane_of(int(text.split()[1])) for text in opened} == {2, 3}


def test_every_document_once_an_epoch_packed_without_padding(opened):
    batches = load(lanes=1, batch_size=1, sequence_length=8).train_batches()
    stream = bytes(i for row in rows_of(batches, 400) for i in row)
    documents = stream.split(b"\0")[:-1]
    epoch = sorted(f"story {i} " * (1 + i % 4) for i in range(60))
    assert sorted(d.decode() for d in documents[:60]) == epoch
    assert sorted(d.decode() for d in documents[60:120]) == epoch
    assert documents[:60] != documents[60:120]


def test_segments_and_labels_of_a_stream(opened):
    batch = next(load().train_batches())
    for ids, labels, segments in zip(*batch.values(), strict=True):
        begins = np.diff(segments, prepend=0) != 0
        assert segments[0] == 1 and (segments > 0).all()
        assert (labels[begins][1:] == -100).all()  # the first has nothing before it to predict it
        assert (labels[~begins] == ids[~begins]).all()


def test_held_out_documents_are_those_of_the_split(opened):
    data = load()
    held_out = data.eval_set(2)
    text = bytes(i for batch in held_out.batches for row in batch["input_ids"] for i in row)
    assert text.startswith(b"held out 0\0held out 1\0")
    assert [b["input_ids"].shape for b in held_out.batches] == [(4, 16)] * 2
    assert held_out.bytes_per_token == pytest.approx(1)
    with pytest.raises(ValueError, match=r"data\.huggingface\.eval_split = '': nothing to evalua"):
        load(eval_split="").eval_set(1)


def test_tokens_are_made_of_a_stream(opened, tmp_path):
    tokenize(config_of(), tmp_path / "tokens")
    meta = json.loads((tmp_path / "tokens/meta.json").read_text())
    assert meta["train"]["num_documents"] + meta["held_out"]["num_documents"] == 60


def test_refusals(opened, monkeypatch):
    with pytest.raises(
        ValueError, match=r"name = 'other', split 'train': cannot be opened \(Datas"
    ):
        load(name="other")
    batches = load(lanes=64, batch_size=64).train_batches()
    with pytest.raises(
        ValueError, match=r"lanes = 64: the data set has no document for lane 60\. "
    ):
        next(batches)
    for stream in ({"lanes": 3}, {"lanes": 6}):
        with pytest.raises(
            ValueError, match=r"data\.huggingface\.lanes = \d: give a multiple or a"
        ):
            config_of(**stream)
    with pytest.raises(ValueError, match=r"data\.huggingface\.lanes = 0: give at least 1"):
        config_of(lanes=0)
    with pytest.raises(ValueError, match=r"data\.packing = 'fit': a stream is packed as it comes"):
        DataConfig(source="huggingface", huggingface=HuggingFaceConfig(name="x"), packing="fit")
    state = load().train_batches().state_dict()
    with pytest.raises(
        ValueError, match=r"data\.huggingface\.lanes = 2: the checkpoint's data has"
    ):
        load(lanes=2).train_batches().load_state_dict(state)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"not installed: pip install -e '\.\[datasets\]'"):
        load()


def test_a_row_that_is_no_text_is_named(opened, monkeypatch):
    rows = Rows([{"text": "fine"}, {"text": 3}], [])
    monkeypatch.setattr("train.data.streaming.open_rows", lambda config, split: rows)
    batches = load(lanes=1, batch_size=1, shuffle_buffer=1, eval_split="").train_batches()
    with pytest.raises(ValueError, match=r"'stories', split 'train', row 1: field 'text' is int"):
        next(batches)
