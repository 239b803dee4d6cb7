"""Kernels that `benchmarks.kernel_profile` knows: one function an op, one entry a shape.

An entry says how to lower the kernel, which of its arguments decide its steps, and when each region
of its body runs; grid, blocks and copies come from the kernel itself. A new kernel is a function
that returns its entries and a line in `OPS`.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.kernel_entry import Kernel
from benchmarks.megablox import megablox_gmm, megablox_products
from pallas_ops.expert_mlp import kernel as expert_kernel
from pallas_ops.gmm import kernel as gmm_kernel
from pallas_ops.gmm import shapes as gmm_shapes
from pallas_ops.tgmm import kernel as tgmm_kernel
from pallas_ops.tgmm import shapes as tgmm_shapes
from pallas_ops.tiling import Tiles


def find(op: str, shape: str, tiles: Tiles | None = None) -> Kernel:
    """The entry of one kernel. Raises ValueError, naming what is known."""
    entries = kernels(op, tiles)
    if shape not in entries:
        raise ValueError(f"{op} has no shape {shape!r}; use one of {sorted(entries)}")
    return entries[shape]


def kernels(op: str, tiles: Tiles | None = None) -> dict[str, Kernel]:
    """The entries of one op by shape, with the op's own tiles or the given ones."""
    if op not in OPS:
        raise ValueError(f"op={op!r} is unknown; use one of {sorted(OPS)}")
    return {kernel.shape: kernel for kernel in OPS[op](tiles)}


def _refuse_tiles(op: str, tiles: Tiles | None) -> None:
    if tiles is not None:
        raise ValueError(f"op={op!r} is profiled with the tiles it chooses; leave tiles out")


def _gmm_signature(shape: gmm_shapes.GmmShape) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Of rows, matrices and sizes."""
    return (
        ((shape.num_rows, shape.size_k), "bfloat16"),
        (shape.rhs_shape, "bfloat16"),
        ((shape.num_groups,), "int32"),
    )


def _gmm(tiles: Tiles | None) -> list[Kernel]:
    _refuse_tiles("gmm", tiles)
    return [
        Kernel(
            op="gmm",
            shape=shape.name,
            fn=gmm_kernel.gmm,
            signature=_gmm_signature(shape),
            static={"transpose_rhs": shape.transpose_rhs},
            flops=shape.flops,
            compiled_name="gmm",
            routed={2: (shape.num_rows, shape.num_groups)},
            is_tiny=shape in gmm_shapes.TINY,
        )
        for shape in (*gmm_shapes.GEMMA4_26B, *gmm_shapes.TINY[1:2])
    ]


def _expert_mlp(tiles: Tiles | None) -> list[Kernel]:
    """Its products with a gate inside; the other is gmm's."""
    _refuse_tiles("expert_mlp", tiles)
    wi, *_, wo = gmm_shapes.GEMMA4_26B
    gated = [
        Kernel(
            op="expert_mlp",
            shape=f"{wi.name}, gated{', product kept' * keeps_product}",
            fn=expert_kernel.gmm_gelu_gate,
            signature=_gmm_signature(wi),
            static={"keeps_product": keeps_product},
            flops=wi.flops,
            compiled_name="gmm_gelu_gate",
            routed={2: (wi.num_rows, wi.num_groups)},
        )
        for keeps_product in (False, True)
    ]
    dout, down, group_sizes = _gmm_signature(wo)
    product = ((wi.num_rows, wi.size_n), "bfloat16")
    gradient = Kernel(
        op="expert_mlp",
        shape=f"{wo.name}, gradient of the gate",
        fn=expert_kernel.gmm_gate_gradient,
        signature=(dout, down, product, group_sizes),
        flops=wo.flops,
        compiled_name="gmm_gate_gradient",
        routed={3: (wo.num_rows, wo.num_groups)},
    )
    return [*gated, gradient]


def _tgmm(tiles: Tiles | None) -> list[Kernel]:
    _refuse_tiles("tgmm", tiles)
    return [
        Kernel(
            op="tgmm",
            shape=f"{shape.name}, {dtype}",
            fn=tgmm_kernel.tgmm,
            signature=(
                ((shape.num_rows, shape.size_k), "bfloat16"),
                ((shape.num_rows, shape.size_n), "bfloat16"),
                ((shape.num_groups,), "int32"),
            ),
            static={"out_dtype": dtype},
            flops=shape.flops,
            compiled_name="tgmm",
            routed={2: (shape.num_rows, shape.num_groups)},
        )
        for shape in tgmm_shapes.GEMMA4_26B
        for dtype in ("float32", "bfloat16")
    ]


def _megablox(tiles: Tiles | None) -> list[Kernel]:
    return [
        Kernel(
            op="megablox",
            shape=f"[{m},{k}]x[128,{k},{n}]",
            fn=megablox_gmm,
            signature=(((m, k), "bfloat16"), ((128, k, n), "bfloat16"), ((128,), "int32")),
            static={"tiles": tiles or Tiles(512, k, n)},
            flops=2 * m * k * n,
            compiled_name="gmm",
            routed={2: (m, 128)},
            libtpu_flags=("--xla_tpu_scoped_vmem_limit_kib=81920",),  # it names no limit itself
            published_ms=published,
            note=note,
        )
        for m, k, n, published, note in PUBLISHED
    ]


_BOUNDS = (
    "{}; which groups the published run had is not known, and its kernel is tokamax's: aligned "
    "groups give a bound from below, as they should, and unaligned ones cost up to 25 % more steps"
)
_DMA = (
    "low: copies take 88 % of the time at full bandwidth, so what the model leaves out counts; "
    "1,400 GB/s and 0.2 us more a step, both guesses, would give 0.87 aligned and 0.90 worst"
)
# From tokamax's autotune tables for v6e, bf16; the last line is the peer of estimating.md.
PUBLISHED = (
    (262_144, 4096, 1536, 4.589, _BOUNDS.format("compute-bound")),
    (262_144, 1536, 4096, 4.851, _BOUNDS.format("compute-bound but where the group changes")),
    (393_216, 2048, 768, 2.237, _DMA),
    (262_144, 2816, 1408, None, ""),
)


def xla_matmul(lhs, rhs, *, interpret: bool):
    """XLA's own product: lhs [M, K], rhs [K, N] to ([M, N],)."""
    del interpret
    return (lhs @ rhs,)


def _xla_matmul(tiles: Tiles | None) -> list[Kernel]:
    if tiles is not None:
        raise ValueError("op='xla_matmul' chooses its own tiles; leave tiles out")
    m, k, n = gmm_shapes.R26B, 2816, 1408
    return [
        Kernel(
            op="xla_matmul",
            shape=f"{m}x{k}x{n}",
            fn=xla_matmul,
            signature=(((m, k), "bfloat16"), ((k, n), "bfloat16")),
            flops=2 * m * k * n,
            compiled_name="fusion",
            is_pallas=False,
        )
    ]


OPS: dict[str, Callable[[Tiles | None], list[Kernel]]] = {
    "gmm": _gmm,
    "expert_mlp": _expert_mlp,
    "tgmm": _tgmm,
    "megablox": _megablox,
    "megablox_26b": megablox_products,
    "xla_matmul": _xla_matmul,
}
CALIBRATION = ("megablox", "xla_matmul")
"""Ops that are only there to check the estimates."""
PEERS = ("megablox_26b",)
"""Ops that only `benchmarks.gmm` asks for, by name."""
