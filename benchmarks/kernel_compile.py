"""Compiles one kernel of the registry for one v6e chip, with the compiler's low-level dump on.

    python -m benchmarks.kernel_compile OP SHAPE [TILE_M TILE_K TILE_N]     one JSON object

It is a process of its own because libtpu reads LIBTPU_INIT_ARGS once, when it is loaded. No TPU is
needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import kernel_registry
from benchmarks.kernel_entry import Kernel
from pallas_ops.tiling import Tiles

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # lowering needs no device
    "TPU_SKIP_MDS_QUERY": "1",  # libtpu would wait for the metadata server of a cloud VM
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no lock file: nothing here owns a chip
}


def compile_with_dump(kernel: Kernel, tiles: Tiles | None, folder: Path) -> float:
    """Compiles in a child process, dumping into `folder` (100 to 700 MB).

    Returns seconds of the compiler. Raises RuntimeError with what the compiler said.
    """
    flags = (f"--xla_jf_dump_to={folder}", "--xla_jf_dump_llo_text=true", *kernel.libtpu_flags)
    sizes = () if tiles is None else (tiles.tile_m, tiles.tile_k, tiles.tile_n)
    command = [sys.executable, "-m", __name__, kernel.op, kernel.shape, *map(str, sizes)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env={**os.environ, **ENVIRONMENT, "LIBTPU_INIT_ARGS": " ".join(flags)},
        capture_output=True,
        text=True,
    )
    result = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    if "seconds" not in result:
        said = result.get("error") or done.stderr[-2000:]
        raise RuntimeError(f"{kernel.op} {kernel.shape!r} does not compile for v6e: {said}")
    return result["seconds"]


def main(op: str, shape: str, *sizes: str) -> None:
    """The child: compiles and prints seconds, or error."""
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    from pallas_ops import bridge

    kernel = kernel_registry.find(op, shape, Tiles(*map(int, sizes)) if sizes else None)
    lowered = bridge.lower(kernel.fn, kernel.signature, static=kernel.static, target="tpu")
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name="v6e:1x1", chips_per_host_bounds=(1, 1, 1), num_slices=1
    )
    (device,) = topology.devices
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    bytecode = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    start = time.perf_counter()
    try:
        device.client.compile(bytecode, xla_client.DeviceList((device,)), options)
    except Exception as error:  # jaxlib's error type differs by what failed
        print(json.dumps({"error": str(error)}))
        return
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main(*sys.argv[1:])
