"""Text as bytes: the tokenizer that needs no file."""

import numpy as np


class ByteTokenizer:
    """Token ids are the 256 byte values of UTF-8 text, so one token is one byte.

    Byte 0 occurs in no text and is the separator: it ends every document (see
    `train.data.packing`), and a model that draws it has finished.
    """

    vocab_size = 256
    separator = 0

    def encode(self, text: str | bytes) -> np.ndarray:
        """uint8 ids [length], without a separator. Bytes go through as they are.

        Raises ValueError where the text holds byte 0.
        """
        data = text.encode() if isinstance(text, str) else text
        if self.separator in data:
            raise ValueError(
                f"byte 0 at offset {data.index(self.separator)}: this is not text. "
                "Leave the file out (--data.path, --data.pattern)"
            )
        return np.frombuffer(data, dtype=np.uint8)

    def decode(self, ids: np.ndarray) -> str:
        """Text of int ids [length]. Bytes that are not UTF-8 become U+FFFD."""
        return np.asarray(ids, dtype=np.uint8).tobytes().decode("utf-8", errors="replace")
