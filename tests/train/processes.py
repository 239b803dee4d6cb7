"""What tests that start processes of their own share."""

import os
import subprocess
import sys
from pathlib import Path

_OURS = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS")


def run_module(name, *arguments, **variables):
    """`python -m name arguments` from the repository's root: its output. This process's choice of
    devices is not passed on; `variables` are."""
    environment = {key: value for key, value in os.environ.items() if key not in _OURS}
    done = subprocess.run(
        [sys.executable, "-m", name, *map(str, arguments)],
        env=environment | variables,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, f"{name} {arguments}: {done.stderr[-4000:]}"
    return done.stdout


def bytecode(name, outputs):
    """StableHLO of lazy tensors that were made from placeholders, as MLIR bytecode."""
    import torch_xla
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jax._src.lib.mlir import ir

    context = torch_xla._XLAC.lowering.LoweringContext(name)
    context.build(outputs)
    with mlir.make_ir_context():
        module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(context.hlo()))
        return mlir.module_to_bytecode(module)
