"""Attention of one training step on v6e by static schedules: ours beside jax's splash attention.

    python -m benchmarks.attention [--out benchmarks/results/attention_v6e.json]

No TPU: every time is modelled, none measured. Each Pallas call of forward and backward is compiled
alone at the shapes of one chip of the 26B's training (two sequences of 16,384 tokens); a step runs
every layer's forward twice, since all of it is recomputed, and its backward once. Transposes and
row sums around the calls are XLA's and not in these figures. A row's ideal_tflop is that of its
whole phase (backward is two calls of splash); its mxu_tflop is what its issued products come to.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.kernel_profile import MODELLED, provenance
from pallas_ops.attention import kernel
from pallas_ops.attention.shapes import GEMMA4_26B, AttentionShape
from train.compile.static.grid_steps import PallasCall, trace_calls
from train.compile.static.profile import CallProfile, profile_call
from train.compile.static.schedule import VMATMUL_FLOPS

LAYERS = {"local": 25, "global": 5}
"""Of the 26B, by shape."""
SPLASH_BLOCKS = ((1024, 512), (512, 512))
"""Query and key blocks, and keys a product, of what is compared with."""


@dataclass(frozen=True)
class Options:
    """Model attention on v6e, ours and jax's splash attention."""

    out: Path | None = None
    """File for the JSON rows."""
    ours: bool = False
    """Leave splash attention out; its rows in `out` stay."""


@dataclass(frozen=True)
class Variant:
    """One implementation at one shape."""

    name: str
    """Who made it, and its blocks."""
    shape: AttentionShape
    """What is computed."""
    forward: tuple[PallasCall, ...]
    """Calls of a forward pass."""
    backward: tuple[PallasCall, ...]
    """Calls of a backward pass."""


def _signature(shape: AttentionShape) -> tuple[tuple[tuple[int, ...], str], ...]:
    """q, k, v and segment ids, as the op takes them."""
    rows = (shape.batch, shape.length)
    queries = ((*rows, shape.num_heads, shape.head_dim), "bfloat16")
    keys = ((*rows, shape.num_kv_heads, shape.head_dim), "bfloat16")
    return queries, keys, keys, (rows, "int32")


def ours(shape: AttentionShape) -> Variant:
    """This project's kernels, with their own choice of blocks."""
    queries, keys, values, segments = _signature(shape)
    lse = ((shape.batch, shape.num_heads, shape.length), "float32")
    static = {"window": shape.window, "interpret": False}
    forward = functools.partial(kernel.attention, **static)
    backward = functools.partial(kernel.attention_backward, **static)
    results = (queries, lse, queries)
    return Variant(
        "ours",
        shape,
        tuple(trace_calls(forward, (queries, keys, values, segments), {})),
        tuple(trace_calls(backward, (queries, keys, values, *results, segments), {})),
    )


def splash(shape: AttentionShape, block: int, block_compute: int) -> Variant:
    """jax's splash attention, a mask for each head, the batch by vmap."""
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    size = (shape.length, shape.length)
    if shape.window is None:
        mask = splash_attention_mask.CausalMask(size)
    else:
        mask = splash_attention_mask.LocalMask(size, (shape.window - 1, 0), 0)
    blocks = splash_attention_kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block_compute,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block_compute,
        block_q_dq=block,
        block_kv_dq=block,
    )
    attend = splash_attention_kernel.make_splash_mha(
        mask=splash_attention_mask.MultiHeadMask([mask] * shape.num_heads),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
    )

    def one(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return attend(q, k, v, splash_attention_kernel.SegmentIds(q=ids, kv=ids))

    def forward(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return jax.vmap(one)(q, k, v, ids)

    def both(q: Any, k: Any, v: Any, ids: Any, dout: Any) -> Any:
        return jax.vjp(lambda *arrays: forward(*arrays, ids), q, k, v)[1](dout)

    arrays, (ids_shape, ids_dtype) = _signature(shape)[:3], _signature(shape)[3]
    heads_first = [((b, n, s, h), dtype) for (b, s, n, h), dtype in arrays]
    signature = (*heads_first, (ids_shape, ids_dtype))
    first, *rest = trace_calls(both, (*signature, heads_first[0]), {})
    return Variant(f"splash {block}/{block_compute}", shape, (first,), tuple(rest))


def rows_of(variant: Variant) -> Iterable[dict[str, Any]]:
    """Profiles each call of a variant."""
    for phase, calls, runs in (
        ("forward", variant.forward, 2),
        ("backward", variant.backward, 1),
    ):
        ideal = getattr(variant.shape, f"{phase}_flops")
        for call in calls:
            profile = profile_call(call, _FLAGS)
            layers = LAYERS[variant.shape.name]
            yield {
                "source": MODELLED,
                "implementation": variant.name,
                "shape": variant.shape.name,
                "phase": phase,
                "kernel": call.name,
                "ideal_tflop": round(ideal / 1e12, 3),
                "runs_a_step": runs * layers,
                "step_s": round(runs * layers * profile.time.total, 5),
                **figures(profile),
            }


_FLAGS = ("--xla_tpu_scoped_vmem_limit_kib=81920",)  # splash names no limit itself


def figures(profile: CallProfile) -> dict[str, Any]:
    """Of one call."""
    ones = np.ones(profile.schedule.num_bundles)
    bundles = profile.sums(ones)
    vmatmuls = profile.sums(profile.schedule.vmatmuls).sum()
    mxu = profile.sums(profile.schedule.slots["MXU"]).sum()
    return {
        "est_us": round(1e6 * profile.time.total, 1),
        "compute_us": round(1e6 * profile.time.compute, 1),
        "dma_us": round(1e6 * profile.time.dma, 1),
        "num_steps": profile.steps.num_steps,
        "bundles": int(bundles.max()),
        "bundles_mean": round(float(bundles.mean()), 1),
        # A vmatmul is 16 rows against 256 x 256.
        "mxu_tflop": round(float(vmatmuls) * VMATMUL_FLOPS / 1e12, 3),
        "mxu_occupancy": round(mxu / bundles.sum() / profile.schedule.capacity["MXU"], 4),
        "vmem_bytes": profile.schedule.vmem_bytes,
        "is_upper_bound": profile.caveat != "",
        "compile_s": round(profile.compile_s, 2),
    }


def totals(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Modelled seconds of a step by implementation. For splash, of either block size."""
    found: dict[str, float] = {}
    for row in rows:
        found[row["implementation"]] = found.get(row["implementation"], 0.0) + row["step_s"]
    return {name: round(seconds, 4) for name, seconds in found.items()}


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "": lambda row: f"{row['shape']}, {row['implementation']}",
        # Splash spells out its blocks in its kernels' names.
        "kernel": lambda row: row["kernel"].split("_block_")[0],
        "steps": lambda row: f"{row['num_steps']:,}",
        "bundles": lambda row: f"{row['bundles']:,}",
        "MXU": lambda row: f"{row['mxu_occupancy']:.0%}",
        "TFLOP ideal": lambda row: f"{row['ideal_tflop']:.2f}",
        "on the MXU": lambda row: f"{row['mxu_tflop']:.2f}",
        "est us": lambda row: f"{row['est_us']:,.0f}",
        "s a step": lambda row: f"{row['step_s']:.3f}",
    }
    table = Table(title="Attention of a step on v6e: modelled", caption=MODELLED)
    for name in columns:
        table.add_column(name, overflow="fold", justify="right" if name else "left")
    for row in rows:
        table.add_row(*(text(row) for text in columns.values()))
    console = Console(width=120)
    console.print(table)
    for name, seconds in totals(rows).items():
        console.print(f"{name}: {seconds:.3f} s of a step")


def _written(path: Path | None) -> list[dict[str, Any]]:
    """Rows of an earlier run."""
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text())
    return found["rows"]


def main(options: Options) -> None:
    """Profile, print, write."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # grids are evaluated; nothing looks for a TPU
    variants = [ours(shape) for shape in GEMMA4_26B]
    if not options.ours:
        variants += [splash(s, *blocks) for s in GEMMA4_26B for blocks in SPLASH_BLOCKS]
    names = {variant.name for variant in variants}
    rows = [row for row in _written(options.out) if row["implementation"] not in names]
    for variant in variants:
        new = [row | provenance("benchmarks.attention") for row in rows_of(variant)]
        rows = sorted([*rows, *new], key=lambda row: row["implementation"])
        if options.out is not None:
            found = {"step_s": totals(rows), "rows": rows}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main(tyro.cli(Options))
