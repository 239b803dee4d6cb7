"""Documents as one row of tokens, cut into sequences.

All documents lie one after the other, each ended by a separator, and sequence i is tokens
[i * S, (i + 1) * S) of that row: nothing is padded but the end of the last sequence, and any
sequence is at hand without the ones before it, so that a position in the data is one number.
A document that crosses a cut goes on in the next sequence without its past.
"""

import numpy as np

from train.data.files import Document
from train.data.tokenizer import ByteTokenizer

IGNORED = -100
"""Label of a position that carries no loss."""


class PackedSequences:
    """`packed[i]` is sequence i: a dict of int32 arrays [S].

    input_ids     tokens; 0 on padding.
    segment_ids   1, 2, ... for the documents of this sequence, 0 on padding. Attention and loss
                  stay inside one segment.
    labels        input_ids, not shifted, with IGNORED on padding and on the first token of every
                  segment, which the token before it (another document's) must not predict.

    Holds one byte a token and eight a document.
    """

    def __init__(self, documents: list[Document], sequence_length: int, tokenizer: ByteTokenizer):
        """Raises ValueError naming the file that is not text, or if there are no documents."""
        if not documents:
            raise ValueError("no documents: there is no text to make sequences from")
        pieces = []
        for document in documents:
            try:
                pieces.append(tokenizer.encode(document.text))
            except ValueError as error:
                raise ValueError(f"data.path: {document.path}: {error}") from error
        ends = np.cumsum([len(piece) + 1 for piece in pieces])  # one past each separator
        tokens = np.full(ends[-1], tokenizer.separator, dtype=np.uint8)
        for piece, end in zip(pieces, ends, strict=True):
            tokens[end - 1 - len(piece) : end - 1] = piece
        self._tokens = tokens
        self._ends = ends
        self._sequence_length = sequence_length

    @property
    def num_tokens(self) -> int:
        """Tokens, separators included."""
        return len(self._tokens)

    def __len__(self) -> int:
        return -(-self.num_tokens // self._sequence_length)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        length = self._sequence_length
        start = index * length
        tokens = self._tokens[start : start + length]
        valid = len(tokens)
        input_ids = np.zeros(length, dtype=np.int32)
        input_ids[:valid] = tokens

        first, last = np.searchsorted(self._ends, [start, start + valid - 1], side="right")
        ends = self._ends[first:last] - start  # documents that end before the last valid token
        segment_ids = np.zeros(length, dtype=np.int32)
        segment_ids[:valid] = 1 + np.searchsorted(ends, np.arange(valid), side="right")

        labels = np.where(segment_ids > 0, input_ids, IGNORED)
        labels[0] = IGNORED
        labels[ends] = IGNORED
        return {
            "input_ids": input_ids,
            "labels": labels.astype(np.int32),
            "segment_ids": segment_ids,
        }
