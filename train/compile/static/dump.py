"""Compiles one module for one v6e chip, with the compiler's low-level dump on.

    python -m train.compile.static.dump MODULE [FLAG ...]      one JSON object

It is a process of its own because libtpu reads LIBTPU_INIT_ARGS once, when it is loaded. No TPU is
needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pallas_ops.compile_only import compile_module, topology_devices
from train.launch import prepare_tracing


def compile_with_dump(name: str, module: bytes, folder: Path, flags: Sequence[str] = ()) -> float:
    """Compiles a StableHLO module in a child process, dumping into `folder` (100 to 700 MB).

    Args:
        name: what it is, for errors.
        module: MLIR bytecode for one device.
        folder: an existing folder.
        flags: more of LIBTPU_INIT_ARGS.

    Returns seconds of the compiler. Raises RuntimeError with what the compiler said.
    """
    dump = (f"--xla_jf_dump_to={folder}", "--xla_jf_dump_llo_text=true")
    with tempfile.NamedTemporaryFile(suffix=".mlirbc") as file:
        file.write(module)
        file.flush()
        done = subprocess.run(
            [sys.executable, "-m", __name__, file.name, *dump, *flags],
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
        )
    result = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    if "seconds" not in result:
        said = result.get("error") or done.stderr[-2000:]
        raise RuntimeError(f"{name} does not compile for v6e: {said}")
    return result["seconds"]


def main(module: str, *flags: str) -> None:
    """The child: compiles and prints seconds, or error."""
    prepare_tracing(libtpu_flags=flags)
    devices = topology_devices("v6e:1x1", (1, 1, 1))
    start = time.perf_counter()
    try:
        compile_module(Path(module).read_bytes(), devices)
    except Exception as error:  # jaxlib's error type differs by what failed
        print(json.dumps({"error": str(error)}))
        return
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main(*sys.argv[1:])
