"""Expert weights stored [E, F, D] or [E, D, F], compiled for a slice of v6e. No TPU.

    python -m benchmarks.orientation         into benchmarks/results/orientation_v6e.json

The six products of one 26B layer with both weights as fp32 shards, gathered in bf16, their
gradients reduce-scattered: what moves and what is allocated are the weights, so few rows do. A
relayout is a copy or a transpose of a megabyte or more; each is told with its bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from train.compile.topology import find_topology
from train.launch import prepare_compiler, prepare_tracing

WIDTH, EXPERT_WIDTH, NUM_EXPERTS = 2816, 704, 128
_LARGE = 1 << 20


@dataclass(frozen=True)
class Options:
    """Compare the two orientations of expert weights by the compiler's program."""

    topology: str = "v6e-128"
    """Slice that the weights are split over."""
    rows: int = 8192
    """Routed rows a chip."""
    out: Path = Path(__file__).parent / "results" / "orientation_v6e.json"
    """File of the two rows."""


def products(x, gate_up, down, group_sizes, dout, *, d_last: bool, interpret: bool):
    """Inside shard_map: forward and backward of one layer's experts, as the ops call the kernels.
    gate_up [E, 2F, D] and down [E, F, D], or with their last two dimensions the other way round."""
    import jax
    import jax.numpy as jnp

    from pallas_ops.gmm.kernel import gmm_sharded
    from pallas_ops.gmm.products import gelu_gate
    from pallas_ops.tgmm.kernel import tgmm_sharded

    def gate(h):
        return gelu_gate(*jnp.split(h, 2, axis=1))

    layout = {"weight_axis": "fsdp", "weight_dim": 0, "interpret": interpret}

    def product(rows, weight, contracts_last):
        return gmm_sharded(rows, weight, group_sizes, transpose_rhs=contracts_last, **layout)[0]

    def gradient(narrow, wide):
        left, right = (narrow, wide) if d_last else (wide, narrow)
        dtypes = {"out_dtype": "float32", "reduce_dtype": "float32", "row_axes": ("fsdp",)}
        return tgmm_sharded(left, right, group_sizes, **dtypes, **layout)[0]

    h = product(x, gate_up, d_last)
    hidden, gate_vjp = jax.vjp(gate, h)
    out = product(hidden, down, not d_last)
    (dh,) = gate_vjp(product(dout, down, d_last))
    dx = product(dh, gate_up, not d_last)
    return out, dx, gradient(dh, x), gradient(hidden, dout)


def compile_products(options: Options, d_last: bool) -> dict[str, Any]:
    """One row: relayouts with bytes, HBM of temporaries, arguments, results, collectives."""
    from jax._src.interpreters import mlir

    from pallas_ops import OpSharding, bridge
    from pallas_ops.compile_only import compile_module, topology_devices
    from train.compile import collectives, hlo

    topology = find_topology(options.topology)
    chips, rows = topology.num_chips, topology.num_chips * options.rows

    def weight(width: int) -> tuple[tuple[int, ...], str]:
        return (NUM_EXPERTS, *((width, WIDTH) if d_last else (WIDTH, width))), "float32"

    tokens, sizes = ((rows, WIDTH), "bfloat16"), ((chips, NUM_EXPERTS), "int32")
    by_rows, whole = ("fsdp", None), ("fsdp", None, None)
    lowered = bridge.lower(
        products,
        (tokens, weight(2 * EXPERT_WIDTH), weight(EXPERT_WIDTH), sizes, tokens),
        static={"d_last": d_last},
        sharding=OpSharding(mesh=(("fsdp", chips),), row_axes=("fsdp",), target="tpu"),
        in_specs=(by_rows, whole, whole, by_rows, by_rows),
        out_specs=(by_rows, by_rows, whole, whole),
        target="tpu",
    )
    module = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    devices = topology_devices(topology.libtpu_name, topology.host_grid)
    executable = compile_module(module, devices)
    memory = executable.get_compiled_memory_stats()
    program = hlo.Program(executable.hlo_modules()[0].to_string())
    return {
        "weights": "[E, F, D]" if d_last else "[E, D, F]",
        "topology": topology.name,
        "rows a chip": options.rows,
        "relayouts": relayouts(program),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "collectives": [
            f"{each.kind} {each.bytes:,} bytes" for _, each in collectives.executed(program)
        ],
    }


def relayouts(program: Any) -> list[str]:
    """Large copies and transposes of a program, inside fusions too, as opcode, shape and bytes:
    not those that only bring an array to VMEM or back."""
    from train.compile.hlo import shape_bytes

    found = []
    for executed in program.executed():
        for part in (executed.instruction, *program.inside(executed.instruction)):
            size = shape_bytes(part.shape)
            if part.opcode in ("copy", "copy-start", "transpose") and size >= _LARGE:
                if not _is_prefetch(part.shape):
                    found.append(f"{part.opcode} {part.shape} {size:,} bytes")
    return found


def _is_prefetch(shape: str) -> bool:
    """Whether a copy's (to, from, ...) differ in their memory alone: VMEM and HBM."""
    from train.compile.hlo import ARRAY, OTHER_SPACE

    arrays = [match[0] for match in ARRAY.finditer(OTHER_SPACE.sub("", shape))]
    return len(arrays) > 1 and arrays[0] == arrays[1]


def main(options: Options) -> None:
    """Compile both, write, print."""
    prepare_compiler(find_topology(options.topology).chip.name)
    prepare_tracing()
    from benchmarks.kernel_profile import provenance

    made = provenance("benchmarks.orientation")
    rows = [compile_products(options, d_last) | made for d_last in (True, False)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(row["weights"], f"temporaries {row['temp_bytes']:,} bytes", row["relayouts"])


if __name__ == "__main__":
    main(tyro.cli(Options))
