"""Text from a model that only knows one shape: no key cache, one compilation.

A window of the last S tokens stands at the right end of [B, S], so that the next token's logits
are always those of the last position, and the window slides once it is full. What is left of the
text is padding in a segment of its own, which attention does not cross.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from train.config import RunConfig
    from train.data.tokenizer import Tokenizer
    from train.mesh import DeviceMesh

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
    vocab_size: int | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Continues `prompt` (int ids [n], n >= 1) by `length` tokens, `batch_size` times.

    Returns int32 ids [batch_size, n + length]. Each row draws its own tokens from
    softmax(logits / temperature), the same for the same seed; temperature 0 takes the likeliest,
    the lowest id among equals. Ids from `vocab_size` on are never drawn: the model may have more of
    them than the tokenizer. B is given by the mesh (a multiple of its devices), so the further
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
        logits = logits_function(input_ids, segment_ids)[:, :vocab_size].astype(np.float64)
        if temperature > 0:  # the largest of logits / temperature + Gumbel noise is such a draw
            logits = logits / temperature + draws.gumbel(size=logits.shape)
        text = np.concatenate([text, logits.argmax(axis=1, keepdims=True)], axis=1, dtype=np.int32)
    return text


class Sampler:
    """Continues a text with a model on a mesh; one program, whatever it is asked."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        mesh: DeviceMesh,
        logits_step: Callable[..., Tensor],
    ) -> None:
        """Raises ValueError for a prompt that the tokenizer cannot encode."""
        self._config, self._tokenizer = config, tokenizer
        self._mesh, self._logits_step = mesh, logits_step
        begin = [] if tokenizer.begin is None else [tokenizer.begin]
        prompt = tokenizer.encode_all([config.sample.prompt.encode()])[0]
        self._prompt = np.concatenate([begin, prompt]).astype(np.int32)

    def is_due(self, step: int) -> bool:
        """Whether a sample is drawn after `step`."""
        sample = self._config.sample
        is_time = step == self._config.steps or (sample.every and step % sample.every == 0)
        return bool(sample.length and is_time)

    def __call__(self) -> str:
        """The prompt and what follows, up to the end of the document."""
        config = self._config
        ids = generate(
            self._logits,
            self._prompt,
            length=config.sample.length,
            sequence_length=config.data.sequence_length,
            batch_size=self._mesh.num_row_shards,
            temperature=config.sample.temperature,
            vocab_size=self._tokenizer.vocab_size,
            seed=config.seed,
        )[0]
        written = ids[len(self._prompt) :]
        ends = np.flatnonzero(written == self._tokenizer.end)
        if len(ends):
            ids = ids[: len(self._prompt) + ends[0]]
        return self._tokenizer.decode(ids)

    def _logits(self, input_ids: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
        batch = {"input_ids": input_ids, "segment_ids": segment_ids}
        return self._logits_step(**self._mesh.place_batch(batch)).cpu().float().numpy()
