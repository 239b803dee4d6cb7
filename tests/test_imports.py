"""Who may import whom, and the other rules of the house that a reading of the files can hold."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("torch_gemma4", "pallas_ops", "train")
SOURCES = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
OTHERS = [file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
MAX_LINES = 400


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def imports(file: Path) -> set[str]:
    """Top-level packages a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def forbidden(file: Path) -> set[str]:
    package = file.relative_to(ROOT).parts[0]
    if package == "torch_gemma4":
        return {"torch_xla", "jax", "jaxlib", "train"}
    if package == "pallas_ops":
        back = {"torch_gemma4", "train"}
        return back | {"torch", "torch_xla"} if file.name == "kernel.py" else back
    return set()


def test_imports_go_one_way():
    wrong = {name_of(file): imports(file) & forbidden(file) for file in SOURCES}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_the_rule_meets_kernels_and_the_model():
    kernels = [file for file in SOURCES if file.name == "kernel.py"]
    assert kernels and all("jax" in imports(file) for file in kernels)
    assert "torch" in imports(ROOT / "torch_gemma4" / "model.py")


@pytest.mark.parametrize("package", ["torch_gemma4", "pallas_ops"])
def test_import_alone_brings_neither_jax_nor_torch_xla(package):
    # Whoever only has CPU tensors pays for neither, and no device is touched.
    code = f"import sys, {package}; print({{'torch_xla', 'jax'}} & set(sys.modules) or 'none')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("none\n", "")


def test_files_are_short_and_ascii():
    for file in SOURCES + OTHERS:
        text = file.read_text()
        assert text.isascii(), name_of(file)
        assert len(text.splitlines()) <= MAX_LINES, name_of(file)


def test_environment_is_touched_in_one_place():
    touching = {
        name_of(file)
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"))
        or (isinstance(node, ast.alias) and node.name in ("environ", "getenv", "putenv"))
    }
    assert touching == {"train/launch.py"}
