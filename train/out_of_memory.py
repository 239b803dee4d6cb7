"""What to say when a device's memory is not enough."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def out_of_memory_explained(config) -> Iterator[None]:
    yield
