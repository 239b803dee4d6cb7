"""checkpoint.json: what a checkpoint is. It is written last, so it is also the finish mark."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("torch-gemma4", "torch", "torch_xla", "jax", "libtpu", "numpy", "grain")


class Damaged(Exception):
    """A checkpoint's files are not what was written; the message says which and how."""


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    size: int
    """Bytes."""
    digest: str
    """Hexadecimal BLAKE2b-128 of the content."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything of a checkpoint but its tensors."""

    step: int
    """Steps done."""
    permanent: bool
    """Whether retention leaves it alone."""
    written: str
    """UTC time, ISO 8601."""
    layout: str
    """Names and shapes of its tensors, see train/checkpoint/layout.py."""
    config: dict[str, Any]
    """The run's configuration."""
    data: dict[str, Any]
    """Position in the data, as its iterator states it."""
    versions: dict[str, str]
    """Of the packages that wrote it, and of Python."""
    files: dict[str, FileRecord]
    """Every other file of the folder."""

    def to_json(self) -> str:
        """As text, which carries a digest of its own."""
        body = asdict(self)
        return json.dumps({"digest": _digest(body), **body}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises Damaged for anything but what `to_json` wrote."""
        try:
            body = json.loads(text)
            digest = body.pop("digest")
            if digest != _digest(body):
                raise Damaged("checkpoint.json does not agree with its own checksum")
            files = {name: FileRecord(**record) for name, record in body.pop("files").items()}
            return cls(files=files, **body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"checkpoint.json cannot be read ({type(error).__name__})") from error


def installed_versions() -> dict[str, str]:
    """What a checkpoint notes of the program that wrote it."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _digest(body: dict[str, Any]) -> str:
    return blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()
