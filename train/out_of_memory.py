"""What to say when a device's memory is not enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING

from train.compile.buffers import buffers_of_message
from train.compile.exhausted import parse_exhausted
from train.compile.remedies import best_remedies
from train.exit_codes import OutOfMemory
from train.sharding import WEIGHT_AXIS, ShardingRow, sharding_table
from train.tables import format_bytes

if TYPE_CHECKING:
    from train.compile.exhausted import Exhausted
    from train.config import RunConfig

_MARK = "RESOURCE_EXHAUSTED"
_NUM_LISTED = 5


@contextmanager
def out_of_memory_explained(config: RunConfig) -> Iterator[None]:
    """Turns the runtime's and the compiler's lack of memory into OutOfMemory."""
    try:
        yield
    except Exception as error:
        if _MARK not in str(error):
            raise
        raise explain(str(error), config) from error


def explain(text: str, config: RunConfig) -> OutOfMemory:
    """What the error says in a line, with the largest buffers and what to change."""
    reason = text[text.index(_MARK) + len(_MARK) :].lstrip(": ").splitlines()[0].rstrip(".")
    rows = sharding_table(config.model, config.mesh)
    exhausted = parse_exhausted(text)
    used = exhausted.used_bytes if exhausted else 0
    # Without that number, no saving that is a share of it can be told.
    cures = [
        f"{cure.options} (about {format_bytes(cure.saved_bytes)})" if used else cure.options
        for cure in best_remedies(config, None, None, used)
    ]
    return OutOfMemory(
        f"out of memory: {reason}. The largest buffers are listed above. What saves most: "
        f"{', '.join(cures)}; python -m train compile tells what fits before you run",
        details="\n".join(_buffer_lines(exhausted, rows) if exhausted else _state_lines(rows)),
    )


def _buffer_lines(exhausted: Exhausted, rows: list[ShardingRow]) -> list[str]:
    lines = ["largest buffers of a device:"]
    for buffer in buffers_of_message(exhausted.allocations, {}, _NUM_LISTED):
        times = f"{buffer.count} x " if buffer.count > 1 else ""
        dims = buffer.shape[buffer.shape.find("[") :]
        names = [row.parameter for row in rows if dims in (_dims(row.shape), _local_dims(row))]
        like = f", shaped as {names[0]}" if names else ""
        lines.append(f"  {times}{format_bytes(buffer.bytes)} {buffer.shape} {buffer.name}{like}")
    return lines


def _state_lines(rows: list[ShardingRow]) -> list[str]:
    largest = sorted(rows, key=lambda row: -row.bytes_per_chip)[:_NUM_LISTED]
    return [
        "the runtime names no buffers; the largest parameters, as float32 with gradient and two "
        "moments, take of each device:",
        *(f"  {format_bytes(4 * row.bytes_per_chip)} {row.parameter}" for row in largest),
    ]


def _dims(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _local_dims(row: ShardingRow) -> str:
    num_shards = 4 * prod(row.shape) // row.bytes_per_chip
    return _dims(
        tuple(
            size // num_shards if axis == WEIGHT_AXIS else size
            for size, axis in zip(row.shape, row.spec, strict=True)
        )
    )
