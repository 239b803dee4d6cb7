"""Hugging Face checkpoints into our parameters and back, bit for bit, a tensor at a time.

`load_pretrained` and `save_pretrained` work on a model; the functions beneath them take any way of
getting at parameters by name, for trainers that hold them sharded. Text is read strictly: every
text tensor of a folder is consumed once and every parameter is filled, or a ValueError names what
is missing, unread, misshapen or of the wrong type, before anything is written. Tensors of vision
and audio are skipped. `lm_head.weight` is a tensor like any other where the head is untied, and an
error where it is tied: a copy of the embedding would be one more thing that can disagree with it.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from torch_gemma4.config import Gemma4Config
from torch_gemma4.hf_names import (
    HEAD_NAME,
    PUBLISHED_PREFIX,
    SKIPPED_PREFIXES,
    TEXT_ONLY_PREFIX,
    Slot,
    hf_to_ours,
)
from torch_gemma4.safetensors_folder import DTYPES, FolderReader, FolderWriter, TensorEntry

MAX_SHARD_BYTES = 50_000_000_000
"""Of a file, unless told otherwise; transformers' own default."""

GetParameter = Callable[[str], torch.Tensor]
"""Our parameter of a name, whole; on any device but "meta"."""


def load_pretrained(model: torch.nn.Module, folder: str | Path) -> None:
    """Fill a `Gemma4ForCausalLM` from a folder of either prefix, converting to its dtypes."""
    load_tensors(model.config, folder, _parameters(model).__getitem__)


def save_pretrained(
    model: torch.nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    prefix: str = PUBLISHED_PREFIX,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a `Gemma4ForCausalLM` as a folder transformers reads; see `save_tensors`."""
    save_tensors(
        model.config,
        folder,
        _parameters(model).__getitem__,
        dtype=dtype,
        prefix=prefix,
        max_shard_bytes=max_shard_bytes,
    )


def iter_hf_tensors(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every text tensor of a folder, each read when its turn comes, in memory of
    its own (a matmul of a tensor at an odd address of the mapped file sums in another order)."""
    reader = FolderReader(folder)
    for name in _text_names(reader):
        yield name, reader.tensor(name).clone()


def open_weights(config: Gemma4Config, folder: str | Path) -> tuple[FolderReader, dict[str, Slot]]:
    """The tensors of `folder` and the slot of each, once they are known to fit: only headers are
    read. Raises ValueError (see the module)."""
    reader = FolderReader(folder)
    names = _text_names(reader)
    published = any(name.startswith(PUBLISHED_PREFIX) for name in names)
    slots = hf_to_ours(config, prefix=PUBLISHED_PREFIX if published else TEXT_ONLY_PREFIX)
    _check_names(reader.folder, found=set(names), wanted=set(slots))
    for name, slot in slots.items():
        _check_tensor(reader, name, slot)
    return reader, slots


@torch.no_grad()
def load_tensors(config: Gemma4Config, folder: str | Path, get_parameter: GetParameter) -> None:
    """Copy every text tensor of `folder` into its slice of our parameters, in place.

    Host memory beyond the parameters is one tensor. Raises ValueError (see the module) before the
    first copy.
    """
    reader, slots = open_weights(config, folder)
    for name, slot in slots.items():
        parameter = get_parameter(slot.parameter)
        if parameter.is_meta:
            raise ValueError(
                f"parameter {slot.parameter} is on the meta device and cannot hold values; "
                f'call model.to_empty(device="cpu") before loading'
            )
        _part(parameter.data, slot).copy_(slot.ours(reader.tensor(name)))


def export_tensors(
    config: Gemma4Config,
    get_parameter: GetParameter,
    *,
    dtype: torch.dtype | None = None,
    prefix: str = PUBLISHED_PREFIX,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, contiguous CPU tensor) of every slice of our parameters, in Hugging
    Face's order, one at a time. `dtype` None keeps each parameter's own. A tensor may share memory
    with its parameter: use it before the next training step."""
    for name, slot in hf_to_ours(config, prefix=prefix).items():
        yield name, _export(slot, get_parameter, dtype)


def save_tensors(
    config: Gemma4Config,
    folder: str | Path,
    get_parameter: GetParameter,
    *,
    dtype: torch.dtype | None = None,
    prefix: str = PUBLISHED_PREFIX,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write our parameters and `config.json` as a Hugging Face folder, a tensor at a time; see
    `new_folder`. `dtype` None keeps each parameter's own."""
    slots = hf_to_ours(config, prefix=prefix)
    dtypes = {n: dtype or get_parameter(slot.parameter).dtype for n, slot in slots.items()}
    with new_folder(
        config, folder, dtypes, prefix=prefix, max_shard_bytes=max_shard_bytes
    ) as writer:
        for name, slot in slots.items():
            writer.tensor(name).copy_(_export(slot, get_parameter, dtype))


@contextmanager
def new_folder(
    config: Gemma4Config,
    folder: str | Path,
    dtypes: Mapping[str, torch.dtype],
    *,
    prefix: str = PUBLISHED_PREFIX,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Iterator[FolderWriter]:
    """A Hugging Face folder with `config.json`, to be filled within the block: every tensor of
    `hf_to_ours(config, prefix=prefix)`, of its dtype in `dtypes`.

    Shards hold up to `max_shard_bytes` of data each; a tied head is not written. Everything goes
    to a temporary folder (`writer.folder`) beside `folder`, renamed when the block ends, so a crash
    leaves no half checkpoint. Raises ValueError where `folder` exists with anything in it (nothing
    saved earlier is ever overwritten), for a dtype that is not a float, and for an unknown prefix;
    OSError.
    """
    folder = Path(folder)
    slots = hf_to_ours(config, prefix=prefix)
    entries = [TensorEntry(name, slot.shape, dtypes[name]) for name, slot in slots.items()]
    for entry in entries:
        if entry.dtype not in DTYPES.values():
            raise ValueError(f"dtype = {entry.dtype}: give one of {list(DTYPES.values())}")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes = {max_shard_bytes}: give a positive number of bytes")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists and is not empty; give a new folder")

    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        writer = FolderWriter(
            partial,
            entries,
            max_shard_bytes=max_shard_bytes,
            # transformers counts parameters alone, and layer_scalar is a buffer there.
            total_parameters=sum(
                torch.Size(slot.shape).numel()
                for name, slot in slots.items()
                if not name.endswith(".layer_scalar")
            ),
        )
        yield writer
        writer.flush()
        content = config.to_hf_dict(
            text_only=prefix == TEXT_ONLY_PREFIX,
            dtype=str(entries[0].dtype).removeprefix("torch."),
        )
        text = json.dumps(content, indent=2) + "\n"
        (partial / "config.json").write_text(text, encoding="utf-8")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors by name, those it does not train (layer_scalar as a buffer) too."""
    state = model.state_dict(keep_vars=True)
    mapped = {slot.parameter for slot in hf_to_ours(model.config).values()}
    assert set(state) == mapped, sorted(set(state) ^ mapped)
    return state


def _export(slot: Slot, get_parameter: GetParameter, dtype: torch.dtype | None) -> torch.Tensor:
    tensor = _part(get_parameter(slot.parameter).detach(), slot)
    # Swapping twice is swapping back.
    return slot.ours(tensor.to(dtype=dtype).cpu()).contiguous()


def _part(parameter: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The slot's part of our parameter, a view; [E, A, B] where that is kept in two halves."""
    part = parameter[slot.index]
    return part.view(slot.part_shape) if slot.split else part


def _text_names(reader: FolderReader) -> list[str]:
    return [name for name in reader.names if not name.startswith(SKIPPED_PREFIXES)]


def _check_names(folder: Path, *, found: set[str], wanted: set[str]) -> None:
    if HEAD_NAME in found - wanted:
        raise ValueError(
            f"{folder}: holds {HEAD_NAME} though tie_word_embeddings is true; set it to false if "
            f"the head is its own, or delete the tensor if it repeats the embedding"
        )
    problems = [
        f"{kind} {len(names)} text tensors: {_first(sorted(names))}"
        for kind, names in (("missing", wanted - found), ("nothing reads", found - wanted))
        if names
    ]
    if problems:
        raise ValueError(
            f"{folder}: {'; '.join(problems)}; use the config.json that belongs to these weights"
        )


def _first(names: Sequence[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def _check_tensor(reader: FolderReader, name: str, slot: Slot) -> None:
    shape, code = reader.shape(name), reader.dtype_code(name)
    if shape != slot.shape:
        raise ValueError(
            f"{reader.folder}: {name} has shape {list(shape)}, expected {list(slot.shape)}; "
            f"use the config.json that belongs to these weights"
        )
    if code not in DTYPES:
        raise ValueError(
            f"{reader.folder}: {name} has dtype {code}, expected one of {', '.join(DTYPES)}; "
            f"use weights that are not quantised"
        )
