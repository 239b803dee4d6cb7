"""Code in the documents runs, and their table of ops has the arguments that the ops have."""

import inspect
import re
from pathlib import Path

import pytest

import pallas_ops

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "moe_ops.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document):
    return BLOCK.findall((ROOT / document).read_text())


@pytest.mark.parametrize(
    ("document", "number"), [("docs/moe_ops.md", 7), ("README.md", 1)], ids=["moe_ops", "README"]
)
def test_code_of_the_ops_runs(document, number):
    own = [block for block in blocks(document) if "pallas_ops" in block or number > 1]
    assert len(own) == number
    namespace = {}
    for block in own:
        exec(compile(block, document, "exec"), namespace)


def test_the_table_of_ops_has_their_arguments():
    calls = re.findall(r"^\| `(\w+)\(([\w, =.]*)\)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(calls) == 10
    for name, arguments in calls:
        names = [a.partition("=")[0] for a in arguments.split(", ") if a != "..."]
        parameters = inspect.signature(getattr(pallas_ops, name)).parameters
        positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if "..." in arguments:
            assert set(names) <= set(parameters)
        else:
            given = [n for n in names if n in positional]
            assert given == positional[: len(given)] and set(names) <= set(parameters), name
