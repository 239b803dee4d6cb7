from pathlib import Path

import pytest


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of 40 short files."""
    for i in range(40):
        folder = tmp_path / "src" / f"part{i % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.py").write_text(f"# file {i}\n" + f"x{i} = {i}\n" * (5 + i))
    return tmp_path / "src"
