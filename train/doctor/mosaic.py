"""Whether libtpu compiles the kernels that this jax writes. No chip is touched.

    python -m train.doctor.mosaic

jax 0.7.1 writes Mosaic IR in a newer format than libtpu 0.0.21 reads, unless it is asked for the
one before (pallas_ops/bridge.py; https://github.com/pytorch/xla/issues/9614).
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
from collections.abc import Iterator
from typing import Any

from train.doctor.children import print_findings
from train.doctor.finding import Finding
from train.launch import prepare_tracing

CHECK = "kernels for v6e"
_SIGNATURE = (((256, 256), "bfloat16"), ((4, 256, 128), "bfloat16"), ((4,), "int32"))


def check_mosaic() -> Iterator[Finding]:
    """Compiles one kernel, gmm, for one v6e chip. Call `train.launch.prepare_tracing` first; what
    the compiler says against it is raised as it is."""
    from jax._src.interpreters import mlir

    from pallas_ops.bridge import lower
    from pallas_ops.compile_only import compile_module, topology_devices
    from pallas_ops.gmm.kernel import gmm

    module = lower(gmm, _SIGNATURE, static={"transpose_rhs": False}, target="tpu").compiler_ir()
    devices = topology_devices("v6e:1x1", (1, 1, 1))
    compile_module(mlir.module_to_bytecode(module), devices)
    libtpu = importlib.metadata.version("libtpu")
    written = mosaic_version(module)
    yield Finding(CHECK, "ok", f"libtpu {libtpu} compiles gmm, written as Mosaic IR {written}")


def mosaic_version(module: Any) -> int:
    """The format of the first Mosaic kernel in a StableHLO module."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    configs = []

    def visit(operation):
        if operation.name == "stablehlo.custom_call":
            configs.append(operation.attributes["backend_config"].value)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    body = base64.b64decode(json.loads(configs[0])["custom_call_config"]["body"])
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        kernel = ir.Module.parse(body)
        return kernel.operation.attributes["stable_mosaic.version"].value


if __name__ == "__main__":
    prepare_tracing()
    print_findings(check_mosaic())
