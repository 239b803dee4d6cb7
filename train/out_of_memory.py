"""What to say when a device's memory is not enough."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.exit_codes import OutOfMemory
from train.sharding import WEIGHT_AXIS, ShardingRow, sharding_table
from train.tables import format_bytes

if TYPE_CHECKING:
    from train.config import RunConfig

_MARK = "RESOURCE_EXHAUSTED"
_ALLOCATION = re.compile(
    r"Size: (?P<size>\S+)\n(?:\s+Operator: op_name=\"(?P<operator>[^\"]*)\".*\n)?"
    r"\s+Shape: (?P<dtype>\w+)\[(?P<dims>[\d,]*)\]"
)
_NUM_LISTED = 5


@dataclass(frozen=True)
class Buffer:
    """An allocation as the compiler lists it."""

    size: str
    """In the compiler's words: 1.38G."""
    shape: str
    """bf16[262144,2816], of one device."""
    operator: str
    """The end of the name of what makes it."""


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
    return OutOfMemory(
        f"out of memory: {reason}. The largest buffers are listed above. Cures: "
        f"{', '.join(cures(config))}; python -m train compile tells what fits before you run",
        details="\n".join(_buffer_lines(text, rows) or _state_lines(rows)),
    )


def largest_buffers(text: str) -> list[tuple[Buffer, int]]:
    """The compiler's largest allocations, each with how often it is there."""
    found: Counter[Buffer] = Counter()
    for match in _ALLOCATION.finditer(text):
        operator = "/".join((match["operator"] or "").split("/")[-2:])
        operator = re.sub(r"\.\d+", "", operator)
        found[Buffer(match["size"], f"{match['dtype']}[{match['dims']}]", operator)] += 1
    return list(found.items())


def cures(config: RunConfig) -> list[str]:
    """Options that would lower this run's need, the cheapest in time first."""
    tiles, batch = config.model.num_loss_tiles, config.data.batch_size
    options = []
    if config.data.sequence_length % (2 * tiles) == 0:
        options.append(f"--model.num_loss_tiles {2 * tiles}")
    if config.attention == "einsum":
        options.append("--attention kernel")
    if not config.recompute:
        options.append("--recompute")
    if batch // 2 % config.mesh.num_devices == 0 and batch > 1:
        options.append(f"--data.batch_size {batch // 2}")
    return [*options, f"--data.sequence_length {config.data.sequence_length // 2}"]


def _buffer_lines(text: str, rows: list[ShardingRow]) -> list[str]:
    lines = []
    for buffer, number in largest_buffers(text)[:_NUM_LISTED]:
        times = f"{number} x " if number > 1 else ""
        dims = buffer.shape[buffer.shape.index("[") :]
        names = [row.parameter for row in rows if dims in (_dims(row), _local_dims(row))]
        like = f", shaped as {names[0]}" if names else ""
        lines.append(f"  {times}{buffer.size} {buffer.shape} from {buffer.operator or '?'}{like}")
    return ["largest buffers of a device:", *lines] if lines else []


def _state_lines(rows: list[ShardingRow]) -> list[str]:
    largest = sorted(rows, key=lambda row: -row.bytes_per_chip)[:_NUM_LISTED]
    return [
        "the runtime names no buffers; the largest parameters, as float32 with gradient and two "
        "moments, take of each device:",
        *(f"  {format_bytes(4 * row.bytes_per_chip)} {row.parameter}" for row in largest),
    ]


def _dims(row: ShardingRow) -> str:
    return f"[{','.join(map(str, row.shape))}]"


def _local_dims(row: ShardingRow) -> str:
    share = row.bytes_per_chip / 4
    whole = 1
    for size in row.shape:
        whole *= size
    split = round(whole / share)
    sizes = (
        size // split if axis == WEIGHT_AXIS else size
        for size, axis in zip(row.shape, row.spec, strict=True)
    )
    return f"[{','.join(map(str, sizes))}]"
