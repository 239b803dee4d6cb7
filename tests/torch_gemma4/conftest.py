"""Saved checkpoints, to be read or spoilt."""

import pytest

from tests.torch_gemma4.checkpoints import build, load_folder
from torch_gemma4 import hf
from torch_gemma4.presets import micro


@pytest.fixture
def checkpoint(tmp_path):
    """(folder, tensors) of a saved micro model in one file, to be spoilt."""
    hf.save_pretrained(build(micro(), seed=0), tmp_path / "model")
    return tmp_path / "model", load_folder(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    """A saved micro model in three shards."""
    folder = tmp_path / "sharded"
    hf.save_pretrained(build(micro(), seed=0), folder, max_shard_bytes=200_000)
    assert len(list(folder.glob("model-*-of-00003.safetensors"))) == 3
    return folder
