"""Text from a model that only knows one shape: no key cache, one compilation.

A window of the last S tokens stands at the right end of [B, S], so that the next token's logits
are always those of the last position, and the window slides once it is full. What is left of the
text is padding in a segment of its own, which attention does not cross.
"""

from collections.abc import Callable

import numpy as np

LogitsFunction = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(input_ids, segment_ids), int32 [B, S] -> logits of the last position, float [B, V]."""


def generate(
    logits_function: LogitsFunction,
    prompt: np.ndarray,
    *,
    length: int,
    sequence_length: int,
    batch_size: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
) -> np.ndarray:
    """Continues `prompt` (int ids [n], n >= 1) by `length` tokens, `batch_size` times.

    Returns int32 ids [batch_size, n + length]. Each row draws its own tokens from
    softmax(logits / temperature), the same for the same seed; temperature 0 takes the likeliest,
    the lowest id among equals. B is given by the mesh (a multiple of its devices), so the further
    rows cost nothing. Raises ValueError for an empty prompt or a negative temperature.
    """
    if len(prompt) == 0:
        raise ValueError("prompt is empty: give at least one token to continue from")
    if temperature < 0:
        raise ValueError(f"temperature = {temperature}: give 0 (the likeliest) or more")
    draws = np.random.default_rng(seed)
    text = np.tile(np.asarray(prompt, dtype=np.int32), (batch_size, 1))
    for _ in range(length):
        window = text[:, -sequence_length:]
        input_ids = np.zeros((batch_size, sequence_length), dtype=np.int32)
        input_ids[:, sequence_length - window.shape[1] :] = window
        segment_ids = np.zeros_like(input_ids)
        segment_ids[:, sequence_length - window.shape[1] :] = 1
        logits = np.asarray(logits_function(input_ids, segment_ids), dtype=np.float64)
        if temperature > 0:  # the largest of logits / temperature + Gumbel noise is such a draw
            logits = logits / temperature + draws.gumbel(size=logits.shape)
        text = np.concatenate([text, logits.argmax(axis=1, keepdims=True)], axis=1, dtype=np.int32)
    return text
