"""`python -m train export`: the weights of a checkpoint as a folder of Hugging Face safetensors.

Stored pieces (a shard of a device each) are read one after the other and copied to their places in
the new files, so the host holds a piece and its copy, whatever the model and the mesh were.
torch_xla is not needed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor

from torch_gemma4.config import Gemma4Config
from torch_gemma4.hf import new_folder
from torch_gemma4.hf_names import PUBLISHED_PREFIX, TEXT_ONLY_PREFIX, Slot, hf_to_ours
from torch_gemma4.safetensors_folder import FolderWriter
from train.checkpoint.compatibility import refuse_other_layout
from train.checkpoint.manifest import Damaged, Manifest
from train.checkpoint.pieces import read_pieces
from train.checkpoint.store import find_checkpoint
from train.exit_codes import StorageFailure
from train.tables import format_bytes
from train.validate import require

Form = Literal["text", "published"]
_PREFIXES = {"text": TEXT_ONLY_PREFIX, "published": PUBLISHED_PREFIX}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_WEIGHTS = "model/"


def export(
    checkpoint: str,
    out: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "50GB",
    form: Form = "text",
    console: Console | None = None,
) -> None:
    """Makes the folder `out` from the weights in the folder (or address) `checkpoint`, and says
    what is in it.

    Raises ValueError for a checkpoint that is not there or of another weight layout, for a folder
    that is there already or cannot be written, for a size that is none, and for a form that the
    model cannot have; StorageFailure for a checkpoint whose files are not what was written. Nothing
    is left behind then.
    """
    console = console or Console()
    max_shard_bytes = size_in_bytes("max_shard_size", max_shard_size)
    store, step = find_checkpoint("checkpoint", checkpoint)
    try:
        manifest = store.manifest(step)
        refuse_other_layout(store.folder(step), manifest)
        model = Gemma4Config.from_dict(manifest.config["model"])
        prefix = _PREFIXES[form]
        require(
            form == "text" or model.pad_token_id is not None,
            "form",
            form,
            "transformers' model of that form needs a padding id, and this one has no "
            "model.pad_token_id: give --form text",
        )
        slots = hf_to_ours(model, prefix=prefix)
        with (
            console.status("exporting: the checkpoint's checksums") as status,
            new_folder(
                model,
                out,
                dict.fromkeys(slots, dtype),
                prefix=prefix,
                max_shard_bytes=max_shard_bytes,
            ) as writer,
        ):
            store.verify(step, manifest.files)
            _copy(store.folder(step), writer, slots, status.update)
            tokenizer = _copy_tokenizer(manifest, writer.folder)
    except Damaged as damage:
        raise StorageFailure(f"the checkpoint {checkpoint} is damaged: {damage}") from damage
    except OSError as error:
        raise ValueError(
            f"out = {str(out)!r}: cannot be written ({error.strerror}). Give a place with room"
        ) from error
    size = sum(torch.Size(slot.shape).numel() for slot in slots.values()) * dtype.itemsize
    tell = {"soft_wrap": True, "highlight": False, "markup": False}
    name = str(dtype).removeprefix("torch.")
    console.print(f"{out}: {len(slots)} tensors, {name}, {format_bytes(size)}", **tell)
    console.print(tokenizer, **tell)


def size_in_bytes(field: str, text: str) -> int:
    """Bytes of a size such as 5GB (decimal units, as in Hugging Face). Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]B)?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise ValueError(f"{field} = {text!r}: give a size such as 5GB or 500MB")
    return size


def _copy(
    folder: str, writer: FolderWriter, slots: dict[str, Slot], tell: Callable[[str], None]
) -> None:
    by_parameter: dict[str, list[tuple[str, Slot]]] = {}
    for name, slot in slots.items():
        by_parameter.setdefault(_WEIGHTS + slot.parameter, []).append((name, slot))
    copied = 0

    def take(parameter: str, offsets: torch.Size, piece: Tensor) -> None:
        nonlocal copied
        tell(f"exporting: {parameter.removeprefix(_WEIGHTS)}")
        for name, slot in by_parameter[parameter]:
            copy = _copy_rows if slot.split else _copy_overlap
            copied += copy(slot, slot.ours(writer.tensor(name)), offsets, piece)

    read_pieces(folder, by_parameter, take)
    total = sum(torch.Size(slot.shape).numel() for slot in slots.values())
    assert copied == total, f"{copied} of {total} numbers"


def _copy_overlap(slot: Slot, target: Tensor, offsets: torch.Size, piece: Tensor) -> int:
    """Copies what a slot's part, `target`, shares with the piece of its parameter that begins at
    `offsets`; returns how many numbers those are."""
    begins, sizes = slot.box
    starts = [max(pair) for pair in zip(begins, offsets, strict=True)]
    ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    piece_ends = [offset + size for offset, size in zip(offsets, piece.shape, strict=True)]
    stops = [min(pair) for pair in zip(ends, piece_ends, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return 0
    source = piece[_from(offsets, starts, stops)]
    # The part lacks the dimensions of layers, of which it has one.
    num_layer_dims = piece.ndim - target.ndim
    target = target[_from(begins, starts, stops)[num_layer_dims:]]
    target.copy_(source[(0,) * num_layer_dims])
    return target.numel()


def _copy_rows(slot: Slot, target: Tensor, offsets: torch.Size, piece: Tensor) -> int:
    """`_copy_overlap` for a part in two halves [2, E * A/2, B], whose `target` is [E, A, B]: the
    rows of one expert after the other."""
    num_layer_dims = len(slot.index)
    layer = [place - offset for place, offset in zip(slot.index, offsets, strict=False)]
    if not all(0 <= i < size for i, size in zip(layer, piece.shape, strict=False)):
        return 0
    own = piece[tuple(layer)]
    half, first_row, column = offsets[num_layer_dims:]
    num_experts, num_rows, _ = slot.part_shape
    for number, rows in enumerate(own.unbind(), start=half):
        row = number * num_experts * num_rows // 2 + first_row
        while len(rows):
            expert, within = divmod(row, num_rows)
            size = min(num_rows - within, len(rows))
            columns = slice(column, column + rows.shape[1])
            target[expert, within : within + size, columns] = rows[:size]
            row, rows = row + size, rows[size:]
    return own.numel()


def _from(origin: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> tuple[slice, ...]:
    """The box from `starts` to `stops`, counted from `origin`."""
    boxes = zip(origin, starts, stops, strict=True)
    return tuple(slice(start - zero, stop - zero) for zero, start, stop in boxes)


def _copy_tokenizer(manifest: Manifest, folder: Path) -> str:
    """Puts the run's tokenizer beside its weights; returns what to say of it."""
    path = Path(manifest.config["data"]["tokenizer"]["path"])
    if path == Path():
        return "tokenizer: the byte tokenizer, which has no file"
    name = "tokenizer.model" if path.suffix == ".model" else "tokenizer.json"
    if not path.is_file():
        return f"tokenizer: {path} is not on this host: copy it into the folder as {name}"
    shutil.copyfile(path, folder / name)
    return f"tokenizer: {name}, from {path}"
