"""The packages that have to fit each other: installed against this project's own pins."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping

from packaging.requirements import Requirement
from packaging.version import Version

from train.doctor.finding import Finding

CHECK = "versions"
PAIRED = ("torch", "torch_xla", "jax", "jaxlib", "libtpu")
"""A kernel passes from jax through torch_xla to libtpu; each reads only formats of its time."""
RIVALS = ("libtpu-nightly",)
"""Packages that bring the module libtpu too, of another day."""


def check_versions(
    *,
    needs_libtpu: bool,
    version: Callable[[str], str] = importlib.metadata.version,
    pins: Mapping[str, Requirement] | None = None,
) -> Finding:
    """Installed versions of PAIRED against `pins`, by default those this project was installed
    with. `version` is importlib.metadata's, or one that raises and returns as it does."""
    if pins is None:
        try:
            pins = declared_pins()
        except importlib.metadata.PackageNotFoundError:
            return Finding(
                *(CHECK, "failed", "torch-gemma4 is not installed here, so no version is pinned"),
                cure="pip install -e . in the repository (-e '.[tpu]' on a TPU host)",
            )
    seen, wrong = [], []
    for name in PAIRED:
        found = _installed(name, version)
        if found is None and name == "libtpu" and not needs_libtpu:
            seen.append("no libtpu (TPU and `compile` need it)")
            continue
        seen.append(f"{name} {found or 'absent'}")
        # 2.9.0+cpu is 2.9.0: the same code, built without CUDA.
        if found is None or Version(Version(found).public) not in pins[name].specifier:
            wrong.append(f"'{name}{pins[name].specifier}'")
    rivals = [name for name in RIVALS if _installed(name, version) is not None]
    cures = []
    if wrong:
        cures.append(f"pip install {' '.join(wrong)}: only this set is tested together")
    if rivals:
        seen.append(f"beside them {', '.join(rivals)}")
        cures.append(f"pip uninstall {' '.join(rivals)}: it brings another libtpu")
    state = "failed" if cures else "ok"
    return Finding(CHECK, state, ", ".join(seen), "; ".join(cures))


def declared_pins() -> dict[str, Requirement]:
    """What torch-gemma4 requires of PAIRED, as it is installed here. Raises
    importlib.metadata.PackageNotFoundError if it is not."""
    requirements = map(Requirement, importlib.metadata.requires("torch-gemma4") or ())
    return {r.name: r for r in requirements if r.name in PAIRED}


def _installed(name: str, version: Callable[[str], str]) -> str | None:
    try:
        return version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
