"""What README and docs tell to type or to follow is there."""

import re
import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from benchmarks.numbers import page
from train.__main__ import COMMANDS, parse
from train.presets import cpu_tiny

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"python -m train\b([^`\n|#;)]*)")
LINK = re.compile(r"\]\(([^)\s]*)\)")


def commands():
    # Those of hugging_face.md need its folders: tests/test_hugging_face_page.py.
    for file in (file for file in PAGES if file.stem != "hugging_face"):
        for found in COMMAND.finditer(file.read_text()):
            arguments = re.split(r" (?:>|&|2>)|'$", found[1])[0].strip()
            # "..." and POLICY stand for something.
            is_whole = not re.search(r"\.\.\.|(^| )[A-Z]+( |$)", arguments)
            if is_whole and not re.match(r"[.\w]", found[1]):
                yield pytest.param(shlex.split(arguments), id=f"{file.stem}: {arguments}")


@pytest.mark.parametrize("arguments", list(commands()))
def test_every_command_can_be_typed(arguments):
    arguments = list(arguments)
    if "--help" in arguments:
        return
    has_name = arguments and not arguments[0].startswith("-")
    name = arguments.pop(0) if has_name else "run"
    assert name in COMMANDS
    if arguments or not has_name:  # a bare name in a sentence need not have what it requires
        assert parse(COMMANDS[name], arguments) is not None


def test_commands_are_found():
    texts = [" ".join(case.values[0]) for case in commands()]
    assert "doctor --preset gemma4_26b_a4b" in texts
    assert "--mesh.fsdp 8 --layers loop --recompute full" in texts and len(texts) > 15


def option_names(config, prefix=""):
    for field in fields(config):
        value = getattr(config, field.name)
        yield prefix + field.name
        if is_dataclass(value):
            yield from option_names(value, f"{prefix}{field.name}.")


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_every_dotted_option_is_one(file):
    named = re.findall(r"--([a-z_]+(?:\.[a-z_]+)+)", file.read_text())
    named = {name.replace(".no_", ".") for name in named}
    assert named <= set(option_names(cpu_tiny()))


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_every_link_leads_somewhere(file):
    for target in LINK.findall(file.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        to = (file.parent / path).resolve() if path else file
        assert to.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", to.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}
            assert anchor in slugs, target


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.stem)
def test_every_file_that_is_named_is_there(file):
    folders = "train|tests|benchmarks|pallas_ops|torch_gemma4|docs"
    for name in re.findall(rf"`((?:{folders})/[\w/.\-]+)`", file.read_text()):
        assert (ROOT / name).exists(), name


def test_the_page_of_numbers_is_that_of_the_results():
    written = (ROOT / "docs" / "numbers.md").read_text()
    assert written == page(), "python -m benchmarks.numbers > docs/numbers.md"
