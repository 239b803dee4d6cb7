"""What docs/hugging_face.md shows works: its Python runs, its commands have these options."""

import re
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.torch_gemma4.checkpoints import build
from torch_gemma4.hf import save_pretrained
from torch_gemma4.hf_names import TEXT_ONLY_PREFIX
from torch_gemma4.presets import micro
from train.__main__ import COMMANDS, parse
from train.presets import PRESETS

PAGE = (Path(__file__).parent.parent / "docs" / "hugging_face.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The folders that the page speaks of, in the working directory."""
    model = build(replace(micro(), vocab_size=256, pad_token_id=0), seed=0)
    save_pretrained(model, tmp_path / "gemma")
    save_pretrained(model, tmp_path / "exported", prefix=TEXT_ONLY_PREFIX)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code, folders):
    if "transformers" in code and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    exec(compile(code, "docs/hugging_face.md", "exec"), {})


def test_commands_have_these_options(folders):
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line)[3:] for line in lines if line.startswith("python -m train")]
    assert len(commands) == 6
    for arguments in commands:
        named = not arguments[0].startswith("-")
        name, options = (arguments[0], arguments[1:]) if named else ("run", arguments)
        parse(COMMANDS[name], options)


def test_options_named_in_the_text_exist():
    config = PRESETS["gemma4_26b_a4b"]().to_dict()
    prefix, found = "", []
    for whole, rest in re.findall(r"`(--[a-z_.]+)|(?<=, )`(\.[a-z_]+)`", PAGE):
        option = whole or f"{prefix}{rest}"  # `.this` is of the part that the one before is of
        prefix = option.rpartition(".")[0]
        found.append(option.removeprefix("--").replace(".no_", "."))
    assert len(found) > 30
    of_commands = {"form", "dtype", "max_shard_size", "preset", "model_from", "checkpoint", "out"}
    for option in set(found) - of_commands:
        value = config
        for name in filter(None, option.split(".")):
            assert name in value, option
            value = value[name]
