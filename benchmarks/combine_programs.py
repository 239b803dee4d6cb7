"""The programs that `benchmarks.combine` compares, compiled for one v6e chip.

    python -m benchmarks.combine_programs NAME FOLDER    writes FOLDER/module.hlo, prints one object

Each is compiled in a process of its own, because libtpu reads LIBTPU_INIT_ARGS once, when it is
loaded. No TPU is needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pallas_ops.compile_only import compile_module, topology_devices
from pallas_ops.routing.blocks import BLOCK
from pallas_ops.routing.shapes import GEMMA4_26B
from train.launch import prepare_tracing

(SHAPE,) = GEMMA4_26B
PLAN, ARGSORT = "routing plan", "argsort"
NUM_BLOCKS = SHAPE.num_tokens // BLOCK
KERNELS = ("combine", "combine backward", "permute", "permute backward")
"""Programs that are one Pallas call."""


@dataclass(frozen=True)
class Program:
    """A JAX function and its arguments."""

    fn: Callable[..., Any]
    """Module-level, called with `interpret`."""
    signature: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and dtype name of its arguments."""
    static: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `fn`."""


def gather_and_sum(rows, weights, row_of_slot, *, interpret: bool):
    """combine as one would write it: rows [R, D], weights [T, K], row_of_slot [T, K] -> [T, D]."""
    import jax.numpy as jnp

    del interpret
    chosen = rows.at[row_of_slot].get(mode="promise_in_bounds").astype(jnp.float32)
    return (jnp.sum(chosen * weights[..., None], axis=1).astype(rows.dtype),)


def plan_for_kernels(expert_ids, *, num_experts: int, block: int, interpret: bool):
    """All that a layer computes of its plan: expert_ids [T, K] -> group_sizes and WindowTables."""
    from pallas_ops.routing import kernel

    options = {"num_experts": num_experts, "block": block, "interpret": interpret}
    bounds, *others = kernel.window_tables(expert_ids, **options)
    return bounds[-1] - bounds[0], bounds, *others


def argsort(expert_ids, *, interpret: bool):
    """One of the sorts that the plan replaces: expert_ids [R] -> [R]."""
    import jax.numpy as jnp

    del interpret
    return (jnp.argsort(expert_ids, stable=True),)


def programs() -> dict[str, Program]:
    """By name: the four kernels, what XLA makes of the same sums, the plan, and a sort."""
    from pallas_ops.combine import kernel as combine
    from pallas_ops.permute import kernel as permute

    t, k, experts = SHAPE.num_tokens, SHAPE.top_k, SHAPE.num_experts
    tokens, rows = (((n, SHAPE.width), "bfloat16") for n in (t, t * k))
    weights, slots = ((t, k), "float32"), ((t, k), "int32")
    slot_of_row = ((t * k,), "int32")
    tables = (
        ((NUM_BLOCKS + 1, experts), "int32"),
        ((NUM_BLOCKS, experts), "int32"),
        slots,
        slots,
        ((NUM_BLOCKS, 3, experts), "int32"),
    )
    plan = (slots, slot_of_row)
    return {
        "combine": Program(combine.combine_windows, (rows, weights, *tables)),
        "combine backward": Program(
            combine.combine_backward_windows, (tokens, rows, weights, *tables)
        ),
        "permute": Program(permute.permute_windows, (tokens, *tables)),
        "permute backward": Program(permute.unpermute_windows, (rows, *tables)),
        "combine, XLA gather and sum": Program(gather_and_sum, (rows, weights, slots)),
        "combine, XLA gather by choice": Program(combine.combine, (rows, weights, *plan)),
        "combine backward, XLA": Program(combine.combine_backward, (tokens, rows, weights, *plan)),
        "permute, XLA": Program(permute.permute, (tokens, *plan)),
        "permute backward, XLA": Program(permute.unpermute, (rows, *plan)),
        PLAN: Program(plan_for_kernels, (slots,), {"num_experts": experts, "block": BLOCK}),
        ARGSORT: Program(argsort, (slot_of_row,)),
    }


def compile_program(name: str, folder: Path, *, dump: bool) -> dict[str, Any]:
    """Compiles in a child process; `folder` gets module.hlo and, with `dump`, the schedules.

    Returns seconds, temp_bytes, argument_bytes, output_bytes. Raises RuntimeError with what the
    compiler said.
    """
    flags = (f"--xla_jf_dump_to={folder}", "--xla_jf_dump_llo_text=true") if dump else ()
    done = subprocess.run(
        [sys.executable, "-m", __name__, name, str(folder), *flags],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{name!r} does not compile for v6e: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(name: str, folder: str, *flags: str) -> None:
    """The child."""
    prepare_tracing(libtpu_flags=flags)
    from jax._src.interpreters import mlir

    from pallas_ops import bridge

    program = programs()[name]
    lowered = bridge.lower(program.fn, program.signature, static=program.static, target="tpu")
    bytecode = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    devices = topology_devices("v6e:1x1", (1, 1, 1))
    start = time.process_time()
    compiled = compile_module(bytecode, devices)
    seconds = time.process_time() - start
    memory = compiled.get_compiled_memory_stats()
    (Path(folder) / "module.hlo").write_text(compiled.hlo_modules()[0].to_string())
    found = {
        "compile_cpu_s": round(seconds, 1),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
