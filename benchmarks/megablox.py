"""jax 0.7.1's public grouped matmuls at the shapes of the 26B model, to compare ours with."""

from __future__ import annotations

from benchmarks.kernel_entry import Kernel
from pallas_ops.gmm import shapes as gmm_shapes
from pallas_ops.tgmm import shapes as tgmm_shapes
from pallas_ops.tiling import Tiles

_FLAGS = ("--xla_tpu_scoped_vmem_limit_kib=98304",)  # these kernels name no limit themselves


def megablox_gmm(
    lhs, rhs, group_sizes, *, tiles: Tiles, transpose_rhs: bool = False, interpret: bool
):
    """jax's public grouped matmul: lhs [R, K], rhs [G, K, N], or [G, N, K] transposed, to
    ([R, N],) of lhs.dtype."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    tiling = (tiles.tile_m, tiles.tile_k, tiles.tile_n)
    out = gmm(
        lhs,
        rhs,
        group_sizes,
        preferred_element_type=lhs.dtype,
        tiling=tiling,
        transpose_rhs=transpose_rhs,
        interpret=interpret,
    )
    return (out,)


def megablox_tgmm(lhs, rhs, group_sizes, *, tiles: Tiles, out_dtype: str, interpret: bool):
    """jax's public weight gradient: lhs [R, K], rhs [R, N] to ([G, K, N],)."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    out = tgmm(
        lhs.swapaxes(0, 1),  # which it turns back
        rhs,
        group_sizes,
        preferred_element_type=out_dtype,
        tiling=(tiles.tile_m, tiles.tile_k, tiles.tile_n),
        interpret=interpret,
    )
    return (out,)


def candidates(size_k: int, size_n: int, *, is_tgmm: bool) -> list[Tiles]:
    """The tiles to choose the best of: K and N whole where VMEM holds them."""
    if is_tgmm:
        return [Tiles(512, size_k, size_n), Tiles(256, size_k, size_n)]
    return [Tiles(512, size_k, size_n), Tiles(256, size_k, size_n), Tiles(128, size_k, size_n)]


def megablox_products(tiles: Tiles | None) -> list[Kernel]:
    """The six products of a layer, named as ours; without tiles, with the first candidate's."""
    found = []
    for shape in gmm_shapes.GEMMA4_26B:
        k, n, groups = shape.size_k, shape.size_n, shape.num_groups
        found.append(
            Kernel(
                op="megablox_26b",
                shape=shape.name,
                fn=megablox_gmm,
                signature=(
                    ((shape.num_rows, k), "bfloat16"),
                    ((groups, *((n, k) if shape.transpose_rhs else (k, n))), "bfloat16"),
                    ((groups,), "int32"),
                ),
                static={
                    "tiles": tiles or candidates(k, n, is_tgmm=False)[0],
                    "transpose_rhs": shape.transpose_rhs,
                },
                flops=shape.flops,
                compiled_name="gmm",
                routed={2: (shape.num_rows, groups)},
                libtpu_flags=_FLAGS,
            )
        )
    for shape in tgmm_shapes.GEMMA4_26B:
        k, n, groups = shape.size_k, shape.size_n, shape.num_groups
        for dtype in ("float32", "bfloat16"):
            found.append(
                Kernel(
                    op="megablox_26b",
                    shape=f"{shape.name}, {dtype}",
                    fn=megablox_tgmm,
                    signature=(
                        ((shape.num_rows, k), "bfloat16"),
                        ((shape.num_rows, n), "bfloat16"),
                        ((groups,), "int32"),
                    ),
                    static={
                        "tiles": tiles or candidates(k, n, is_tgmm=True)[0],
                        "out_dtype": dtype,
                    },
                    flops=shape.flops,
                    compiled_name="tgmm",
                    routed={2: (shape.num_rows, groups)},
                    visits=None,
                    libtpu_flags=_FLAGS,
                )
            )
    return found
