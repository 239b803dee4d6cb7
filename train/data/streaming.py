"""A Hugging Face data set as a stream of packed sequences, without a copy of it on disk.

Sample g comes from lane g modulo `lanes`: a lane is a share of the documents, in an order of its
own, packed by itself. Lanes have nothing to do with hosts, so the samples are the same for any
number of those; a host opens the lanes whose rows it makes, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from train.data.documents import Document, row_document
from train.data.packing import IGNORED, Sequence
from train.data.token_row import encode_documents
from train.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from train.data.config import DataConfig

_IDENTITY = ("name", "subset", "split", "lanes", "shuffle_buffer")


class StreamSource:
    """A `SampleSource` without end: every epoch of a lane is shuffled anew."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        """Raises ValueError if the datasets library is not installed or cannot open the split."""
        stream = config.huggingface
        self._config, self._tokenizer = config, tokenizer
        self._rows = open_rows(config, stream.split)
        self.order = {
            "source": config.source,
            **{f"huggingface.{name}": getattr(stream, name) for name in _IDENTITY},
            # Their folder may move.
            "huggingface.data_files": [PurePath(file).name for file in stream.data_files],
            "huggingface.num_files": self._rows.num_shards,
            "sequence_length": config.sequence_length,
            "seed": config.seed,
            "tokenizer": tokenizer.fingerprint,
        }

    def batches(self, first: int, batch_size: int, rows: list[int]) -> Iterator[list[Sequence]]:
        from train.data.lanes import prefetched

        def make() -> Iterator[list[Sequence]]:
            lanes = _Lanes(self)
            for start in count(first, batch_size):
                yield [lanes.sample(start + row) for row in rows]

        return prefetched(make, self._config.prefetch)

    def lane(self, number: int) -> Iterator[Sequence]:
        """The sequences of one lane."""
        from train.data.lanes import packed

        return packed(lambda: self._documents(number), self._config.sequence_length)

    def _documents(self, lane: int) -> Iterator[dict[str, np.ndarray]]:
        stream = self._config.huggingface
        rows = _share(self._rows, lane, stream.lanes)
        if stream.shuffle_buffer > 1:
            rows = rows.shuffle(seed=self._config.seed, buffer_size=stream.shuffle_buffer)
        for epoch in count():
            rows.set_epoch(epoch)
            documents = documents_of(rows, self._config, stream.split)
            empty = True
            for _, ids, scored in encode_documents(documents, self._tokenizer, at_once=1):
                empty = False
                labels = np.where(np.arange(len(ids)) < max(scored, 1), IGNORED, ids.astype(int))
                yield {"input_ids": ids.astype(np.int32), "labels": labels.astype(np.int32)}
            if empty:
                raise ValueError(
                    f"data.huggingface.lanes = {stream.lanes}: the data set has no document for "
                    f"lane {lane}. Give fewer lanes"
                )


def _share(rows: Any, lane: int, num_lanes: int) -> Any:
    """A lane's files; where there are fewer files than lanes, one in `num_lanes` of all rows."""
    from datasets.distributed import split_dataset_by_node

    if rows.num_shards >= num_lanes:
        return rows.shard(num_lanes, lane)
    return split_dataset_by_node(rows, rank=lane, world_size=num_lanes)


class _Lanes:
    """Lanes opened so far, each read up to some sequence."""

    def __init__(self, source: StreamSource) -> None:
        self._source = source
        self._num_lanes = source.order["huggingface.lanes"]
        self._open: dict[int, tuple[Iterator[Sequence], int]] = {}

    def sample(self, number: int) -> Sequence:
        """Sample `number`; numbers of a lane rise from call to call."""
        position, lane = divmod(number, self._num_lanes)
        sequences, taken = self._open.get(lane) or (self._source.lane(lane), 0)
        self._open[lane] = (sequences, position + 1)
        return next(islice(sequences, position - taken, None))


def open_rows(config: DataConfig, split: str) -> Any:
    """The split as a `datasets.IterableDataset`."""
    stream = config.huggingface
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "data.source = 'huggingface' needs a package that is not installed: "
            "pip install -e '.[datasets]'"
        ) from error
    try:
        return datasets.load_dataset(
            stream.name,
            stream.subset or None,
            split=split,
            data_files=list(stream.data_files) or None,
            streaming=True,
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"data.huggingface.name = {stream.name!r}, split {split!r}: cannot be opened "
            f"({type(error).__name__}: {error}). Check name, subset, split and the network"
        ) from error


def documents_of(rows: Any, config: DataConfig, split: str) -> Iterator[Document]:
    """Documents of rows that `open_rows` opened, empty ones left out."""
    name = config.huggingface.name
    for number, row in enumerate(rows):
        where = f"data.huggingface.name = {name!r}, split {split!r}, row {number}"
        document = row_document(where, row, config)
        if document.text:
            yield document
