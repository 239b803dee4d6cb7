"""Where sequences come from, as data: fields of `RunConfig.data`."""

from dataclasses import dataclass
from typing import Literal

from train.validate import require, require_at_least


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Text to token ids. Without a file a token is a byte, and byte 0 ends a document."""

    path: str = ""
    """A local tokenizer.json, or a SentencePiece file (*.model; needs pip install -e
    '.[sentencepiece]'); none: bytes."""
    begin: str = "<bos>"
    """Token of that file put in front of every document and prompt; '': none."""
    end: str = "<eos>"
    """Token of that file behind every document."""

    def __post_init__(self) -> None:
        require(
            len(self.end) > 0,
            "data.tokenizer.end",
            self.end,
            "documents are told apart by it: name a token of the file, such as '<eos>'",
        )


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig:
    """A data set that the datasets library streams (pip install -e '.[datasets]').

    The stream is read in `lanes`: row r of a batch comes from lane r modulo `lanes`, so the order
    is the same for any number of hosts. A lane has files of its own where there are enough of them;
    else it reads all, and keeps its share. A resumed run reads each lane again up to where it was,
    which takes as long as tokenising did; to resume at once, make tokens first (python -m train
    tokenize) and train on those.
    """

    name: str = ""
    """What load_dataset takes: a data set of the hub, or a builder such as json or parquet."""
    subset: str = ""
    """Its configuration; '': the only one."""
    split: str = "train"
    """To train on."""
    eval_split: str = ""
    """To evaluate on, such as validation; '': no evaluation (--eval.every 0)."""
    data_files: tuple[str, ...] = ()
    """Files for a builder."""
    lanes: int = 64
    """Streams read side by side. A multiple of the batch size: then every host has lanes of its
    own; or a divisor of it."""
    shuffle_buffer: int = 1000
    """Documents of a lane drawn from at random; 1: the stream's own order."""

    def __post_init__(self) -> None:
        for name in ("lanes", "shuffle_buffer"):
            require_at_least(1, f"data.huggingface.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Documents, tokenised and packed into sequences; attention stays inside a document."""

    source: Literal["files", "tokens", "huggingface", "synthetic"] = "files"
    """files: text and .jsonl in memory. tokens: folders made by python -m train tokenize, mapped
    into memory. huggingface: a stream. synthetic: random ids, for measuring."""
    path: tuple[str, ...] = ()
    """files: files and folders to train on; none: the Python standard library's own source. tokens:
    the folder."""
    pattern: tuple[str, ...] = ("*.py", "*.txt", "*.md", "*.jsonl")
    """Names of the files to take from a folder, at any depth; a file in `path` is always taken. In
    *.jsonl every line is a document, any other file is one."""
    skip: tuple[str, ...] = ("site-packages", "dist-packages", "test", "tests", "idle_test")
    """Names of sub-folders to leave out, besides hidden ones."""
    max_bytes: int = 2**30
    """Refuse files of more than this together: their text is held in memory while it is read."""
    text_field: str = "text"
    """Of a .jsonl line or a data set's row: the document."""
    prompt_field: str = "prompt"
    """Of a row without text: what the model is given, and carries no loss."""
    completion_field: str = "completion"
    """Of a row with a prompt: what the model learns to answer."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Text to ids."""
    huggingface: HuggingFaceConfig = HuggingFaceConfig()
    """For source huggingface."""
    packing: Literal["split", "fit"] = "split"
    """split: documents one behind the other, cut every S tokens; nothing is padded. fit: whole
    documents side by side where they fit, and padding; a prompt stays with its completion."""
    restart_positions: bool = False
    """Rotary positions count from 0 in each document, as in Hugging Face, and not in each sequence;
    attention only sees differences, so this changes rounding alone, and costs tables of B * S."""
    sequence_length: int = 128
    """S, tokens of one packed sequence."""
    batch_size: int = 32
    """B, sequences of one step over the whole mesh."""
    eval_fraction: float = 0.05
    """Share of the documents held out of training, chosen by the hash of their content; 0: none.
    For source tokens, it was applied when they were made."""
    seed: int = 0
    """Order of the sequences. Batch i depends on nothing but the documents, this and i."""
    prefetch: int = 8
    """Batches made ahead of the step."""

    def __post_init__(self) -> None:
        require_at_least(2, "data.sequence_length", self.sequence_length)
        for name in ("batch_size", "prefetch", "max_bytes"):
            require_at_least(1, f"data.{name}", getattr(self, name))
        fraction, patterns, path = self.eval_fraction, self.pattern, self.path
        remedy = "give a share of at least 0 and below 1"
        require(0 <= fraction < 1, "data.eval_fraction", fraction, remedy)
        require(0 <= self.seed < 2**32, "data.seed", self.seed, "give a whole number below 2 ** 32")
        require(len(patterns) > 0, "data.pattern", patterns, "give one, such as '*.txt'")
        if self.source == "tokens":
            remedy = "name the one folder that python -m train tokenize made"
            require(len(path) == 1, "data.path", path, remedy)
        if self.source == "huggingface":
            self._check_stream()

    @property
    def batch_arrays(self) -> tuple[str, ...]:
        """Names of a batch's arrays, each int32 [B, S]."""
        names = ("input_ids", "labels", "segment_ids")
        return (*names, "positions") if self.restart_positions else names

    def _check_stream(self) -> None:
        stream, size = self.huggingface, self.batch_size
        remedy = "name the data set to stream"
        require(len(stream.name) > 0, "data.huggingface.name", stream.name, remedy)
        require(
            stream.lanes % size == 0 or size % stream.lanes == 0,
            "data.huggingface.lanes",
            stream.lanes,
            f"give a multiple or a divisor of data.batch_size = {size}, so that a row always comes "
            "from the same lane",
        )
        require(
            self.packing == "split",
            "data.packing",
            self.packing,
            "a stream is packed as it comes: give split, or make tokens first "
            "(python -m train tokenize)",
        )
