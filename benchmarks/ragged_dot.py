"""Plain XLA's grouped matmul at the shapes of the 26B model, compiled for v6e.

    python -m benchmarks.ragged_dot PRODUCT     the child of `estimate`: one JSON object

The time is the compiler's own count of cycles. It has none for custom calls, and says nothing of
how often a loop turns: with either, the time is reported as not to be trusted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pallas_ops.gmm.shapes import GEMMA4_26B as GMM_SHAPES
from pallas_ops.gmm.shapes import GmmShape
from pallas_ops.tgmm.shapes import GEMMA4_26B as TGMM_SHAPES
from train.compile.static.step_time import CLOCK_HZ
from train.launch import prepare_tracing

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def estimate(product: str, flops: int) -> dict[str, Any]:
    """One row of `benchmarks.gmm`, from a child process; `error` where XLA does not compile it."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, product.split(",")[0]],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return {"error": done.stderr[-300:]}
    row = json.loads(done.stdout.splitlines()[-1])
    if "error" in row:
        return row
    seconds = row["cycles"] / CLOCK_HZ
    if row["num_loops"] or row["num_custom_calls"] or not seconds:
        return row | {
            "error": f"no trusted time: {row['num_loops']} loops and {row['num_custom_calls']} "
            "custom calls, whose cycles are not counted"
        }
    return row | {
        "routing": "any",
        "source": "the compiler's estimated_cycles",
        "est_us": round(1e6 * seconds, 3),
        "useful_tflops": round(flops / seconds / 1e12, 1),
        "frac_peak": round(flops / seconds / 918e12, 4),
        "best": True,
    }


def main(product: str) -> None:
    """The child: compiles and prints compile_s, cycles, num_loops, num_custom_calls and
    temp_bytes, or error."""
    prepare_tracing()
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    shape = {s.name: s for s in (*GMM_SHAPES, *TGMM_SHAPES)}[product]
    rows, k, n, groups = shape.num_rows, shape.size_k, shape.size_n, shape.num_groups
    if isinstance(shape, GmmShape):
        # It takes no other layout of the weights: "rhs_contracting_dim != 1 - NYI".
        operand, contracted, group_dims = (groups, k, n), (((1,), (1,)), ((), ())), [0]
    else:
        operand, contracted, group_dims = (rows, n), (((0,), (0,)), ((), ())), []
    numbers = jax.lax.RaggedDotDimensionNumbers(contracted, [0], group_dims)

    def product_of(lhs, rhs, sizes):
        return jax.lax.ragged_dot_general(lhs, rhs, sizes, numbers)

    topology = topologies.get_topology_desc(
        platform="tpu", topology_name="v6e:1x1", chips_per_host_bounds=(1, 1, 1), num_slices=1
    )
    on_chip = SingleDeviceSharding(topology.devices[0])
    arguments = [
        jax.ShapeDtypeStruct(*argument, sharding=on_chip)
        for argument in (((rows, k), jnp.bfloat16), (operand, jnp.bfloat16), ((groups,), jnp.int32))
    ]
    start = time.perf_counter()
    try:
        compiled = jax.jit(product_of).lower(*arguments).compile()
    except Exception as error:  # jaxlib's error type differs by what failed
        print(json.dumps({"error": str(error)[:300]}))
        return
    text = compiled.as_text()
    result = {
        "compile_s": round(time.perf_counter() - start, 2),
        "cycles": sum(map(int, _CYCLES.findall(text))),
        "num_loops": len(re.findall(r" while\(", text)),
        "num_custom_calls": len(re.findall(r" custom-call\(", text)),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
