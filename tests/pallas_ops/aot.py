"""Compiles single kernels for one v6e chip with libtpu's compile-only client. No TPU is needed.

    python tests/pallas_ops/aot.py      one JSON object a program, on a line of its own

It is a process of its own because libtpu and JAX read environment variables when they start, and
because a process that has compiled for a TPU should not go on to run on something else.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # lowering needs no device
    "TPU_SKIP_MDS_QUERY": "1",  # libtpu would wait for the metadata server of a cloud VM
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no lock file: nothing here owns a chip
}
LARGE = 1 << 20
"""Elements from which a relayout is reported; what is below is metadata of groups."""

TOO_LARGE = "tiles beyond VMEM"
CHAIN = "wi forward, two halves"
BRANCH = "branch, forward and backward"
GATED = {"wi forward, gated": False, "wi forward, gated, product kept": True}
GRADIENT = "wo dlhs, gradient of the gate"
EDGE = "gradient of a gate, large matrices"


class Program(NamedTuple):
    """Arguments of `bridge.lower`."""

    fn: Any
    signature: tuple[tuple[tuple[int, ...], str], ...]
    static: dict[str, Any]


def programs() -> dict[str, Program]:
    """Every production product, tgmm with both dtypes of its result, the chain of two halves of
    one, the branch they form, the moves of rows around it, and a product with one tile that no VMEM
    holds."""
    from pallas_ops.expert_mlp import kernel as experts
    from pallas_ops.gmm import kernel as gmm
    from pallas_ops.gmm.shapes import GEMMA4_26B as GMM_SHAPES
    from pallas_ops.tgmm import kernel as tgmm
    from pallas_ops.tgmm.shapes import GEMMA4_26B as TGMM_SHAPES
    from pallas_ops.tiling import Tiles

    found = {}
    for shape in GMM_SHAPES:
        k, n = shape.size_k, shape.size_n
        signature = (
            ((shape.num_rows, k), "bfloat16"),
            ((shape.num_groups, *((n, k) if shape.transpose_rhs else (k, n))), "bfloat16"),
            ((shape.num_groups,), "int32"),
        )
        static = {"transpose_rhs": shape.transpose_rhs}
        found[shape.name] = Program(gmm.gmm, signature, static)
    for shape in TGMM_SHAPES:
        signature = (
            ((shape.num_rows, shape.size_k), "bfloat16"),
            ((shape.num_rows, shape.size_n), "bfloat16"),
            ((shape.num_groups,), "int32"),
        )
        for dtype in ("float32", "bfloat16"):
            found[f"{shape.name}, {dtype}"] = Program(tgmm.tgmm, signature, {"out_dtype": dtype})
    x, gate_up, sizes = found["wi forward"].signature
    for name, keeps_product in GATED.items():
        static = {"keeps_product": keeps_product}
        found[name] = Program(experts.gmm_gelu_gate, (x, gate_up, sizes), static)
    down = found["wo forward"].signature[1]
    product = ((x[0][0], gate_up[0][1]), "bfloat16")
    found[GRADIENT] = Program(experts.gmm_gate_gradient, (x, down, product, sizes), {})
    large = (((8192, 1024), "bfloat16"), ((8, 4096, 1024), "bfloat16"), ((8192, 8192), "bfloat16"))
    found[EDGE] = Program(experts.gmm_gate_gradient, (*large, ((8,), "int32")), {})
    halves = (((64, 1408, 2816), "bfloat16"),) * 2
    found[CHAIN] = Program(two_halves, (x, *halves, sizes), {})
    found[BRANCH] = Program(branch, (x, gate_up, down, sizes, x), {})
    found |= dispatch()
    k, n = 32_768, 2816
    signature = (((16, k), "bfloat16"), ((2, k, n), "bfloat16"), ((2,), "int32"))
    static = {"transpose_rhs": False, "tiles": Tiles(16, k, n)}
    found[TOO_LARGE] = Program(gmm.gmm, signature, static)
    return found


def dispatch() -> dict[str, Program]:
    """permute, combine and their gradients by window tables, of one chip of the 26B run."""
    from pallas_ops.combine import kernel as combine
    from pallas_ops.permute import kernel as permute
    from pallas_ops.routing.blocks import BLOCK
    from pallas_ops.routing.shapes import GEMMA4_26B

    (shape,) = GEMMA4_26B
    t, k, groups = shape.num_tokens, shape.top_k, shape.num_experts
    blocks = t // BLOCK
    tokens, rows = (((n, shape.width), "bfloat16") for n in (t, t * k))
    weights = ((t, k), "float32")
    tables = (
        ((blocks + 1, groups), "int32"),
        ((blocks, groups), "int32"),
        ((t, k), "int32"),
        ((t, k), "int32"),
        ((blocks, 3, groups), "int32"),
    )
    return {
        "permute": Program(permute.permute_windows, (tokens, *tables), {}),
        "permute backward": Program(permute.unpermute_windows, (rows, *tables), {}),
        "combine": Program(combine.combine_windows, (rows, weights, *tables), {}),
        "combine backward": Program(
            combine.combine_backward_windows, (tokens, rows, weights, *tables), {}
        ),
    }


def two_halves(x, low, high, group_sizes, *, interpret):
    """The products of one weight's halves, the second into the memory of the first."""
    from pallas_ops.gmm.kernel import gmm

    options = {"transpose_rhs": True, "interpret": interpret}
    (out,) = gmm(x, low, group_sizes, rest=("zero", "leave"), **options)
    return gmm(x, high, group_sizes, out, group_offset=64, rest=("keep", "zero"), **options)


def branch(x, gate_up, down, group_sizes, dout, *, interpret):
    """The experts of one MoE layer, forward and backward, as the ops of pallas_ops call kernels."""
    from pallas_ops.expert_mlp.kernel import expert_mlp, gmm_gate_gradient
    from pallas_ops.gmm.kernel import gmm
    from pallas_ops.tgmm.kernel import tgmm

    sizes = (group_sizes,)
    options = {"interpret": interpret}
    out, hidden, h = expert_mlp(x, gate_up, down, *sizes, keeps=True, **options)
    (dh,) = gmm_gate_gradient(dout, down, h, *sizes, **options)
    (dx,) = gmm(dh, gate_up, *sizes, transpose_rhs=False, **options)
    (ddown,) = tgmm(hidden, dout, *sizes, out_dtype="float32", **options)
    (dgate_up,) = tgmm(dh, x, *sizes, out_dtype="float32", **options)
    return out, dx, dgate_up, ddown


def compile_elsewhere(source: str) -> dict[str, dict[str, Any]]:
    """Results by name of a process that runs this file with `programs` as `source` defines it."""
    here = Path(__file__).parent
    code = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parents[1])!r}]\nimport aot\n"
    code += f"{source}\naot.programs = programs\naot.main()\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {result.pop("name"): result for result in map(json.loads, done.stdout.splitlines())}


def compile_for_v6e(lowered: Any, device: Any) -> dict[str, Any]:
    """Compiles a `jax.stages.Lowered` for `device`, of a compile-only topology.

    Returns:
        seconds of processor time; then either error, what the compiler said, or temp_bytes,
        argument_bytes and output_bytes of HBM, and relayouts: each large copy or transpose of the
        optimised program, as its opcode and shape.
    """
    from jax._src.interpreters import mlir

    from pallas_ops.compile_only import compile_module

    bytecode = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    start = time.process_time()
    try:
        program = compile_module(bytecode, [device])
    except Exception as error:  # jaxlib's error type differs by what failed
        return {"seconds": time.process_time() - start, "error": str(error)}
    memory = program.get_compiled_memory_stats()
    return {
        "seconds": time.process_time() - start,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "relayouts": relayouts(program.hlo_modules()[0].to_string()),
    }


def relayouts(hlo: str) -> list[str]:
    """Large copies and transposes in the text of an HLO module, inside fusions too."""
    found = []
    for line in hlo.splitlines():
        match = re.search(r" = (.*?) (copy|copy-start|transpose)\(", line)
        # XLA writes gathers with transposes that keep the order of dimensions: they do nothing.
        if match is None or re.search(r"dimensions=\{(0|0,1|0,1,2)\}", line):
            continue
        for dtype, dims in re.findall(r"(\w+)\[([\d,]+)\]", match.group(1)):
            if math.prod(map(int, dims.split(","))) >= LARGE:
                found.append(f"{match.group(2)} {dtype}[{dims}]")
    return found


def main() -> None:
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(Path(__file__).parents[2]))  # a checkout need not be installed
    from pallas_ops import bridge
    from pallas_ops.compile_only import topology_devices

    (device,) = topology_devices("v6e:1x1", (1, 1, 1))
    for name, program in programs().items():
        lowered = bridge.lower(program.fn, program.signature, static=program.static, target="tpu")
        result = compile_for_v6e(lowered, device)
        print(json.dumps({"name": name, **result}), flush=True)


if __name__ == "__main__":
    main()
