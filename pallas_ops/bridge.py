"""The one seam between JAX and torch_xla: a JAX function called inside a lazy torch_xla graph.

    tensors --shapes, dtypes--> jax.jit(fn).trace --lower--> HLO module --> node in the torch_xla
    graph

The function is lowered once per (function, static arguments, shapes, dtypes, sharding, target) and
never runs in JAX: torch_xla compiles the HLO as a part of its own graph. Targets:

- "cpu": Pallas kernels are interpreted (they become plain HLO);
- "tpu": lowered in JAX's export mode, which writes Mosaic IR in the format that libtpu 0.0.21 reads
  (jax 0.7.1 otherwise writes a newer one: https://github.com/pytorch/xla/issues/9614) and needs no
  TPU client in JAX.

Under SPMD the compiler cannot partition a Mosaic call, and torch_xla does not say so: it silently
replicates the call. Therefore a sharded call is always `jax.shard_map` inside the JAX function, on
an abstract mesh, so JAX needs no devices. Device order is the mesh's: 0, 1, 2, ...

Private names used, all covered by tests/pallas_ops/test_bridge.py: `_XLAC._xla_user_computation`,
`_XLAC._init_computation_client`, `jax._src.interpreters.mlir.LoweringParameters`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pallas_ops.sharding import OpSharding, Target

Spec = tuple[Any, ...]
"""One entry a dimension: None, a mesh axis, or a tuple of mesh axes."""

_JAX_DTYPE = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}


@dataclass(frozen=True)
class Lowering:
    """One JAX function as `call` lowered it: the key of a computation."""

    fn: Callable[..., Any]
    """Module-level JAX function."""
    static: tuple[tuple[str, Hashable], ...]
    """Its keyword arguments."""
    signature: tuple[tuple[tuple[int, ...], str], ...]
    """Global shapes and JAX dtype names of its arrays."""
    sharding: OpSharding | None
    """The mesh of the call."""
    specs: tuple[tuple[Spec, ...], tuple[Spec, ...]] | None
    """With a sharding: how inputs and outputs lie on it."""
    target: Target
    """What it was lowered for."""

    @property
    def local_signature(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shapes on one device, and dtype names."""
        if self.sharding is None:
            return self.signature
        sizes = dict(self.sharding.mesh)

        def pieces(axes: Any) -> int:
            names = () if axes is None else (axes,) if isinstance(axes, str) else axes
            return math.prod(sizes[name] for name in names)

        return tuple(
            (tuple(size // pieces(axes) for size, axes in zip(shape, spec, strict=True)), dtype)
            for (shape, dtype), spec in zip(self.signature, self.specs[0], strict=True)
        )


_COMPUTATIONS: dict[Lowering, tuple[str, Any]] = {}
"""A cache: every function is lowered once a process."""


def lowered() -> tuple[Lowering, ...]:
    """Every function that `call` has lowered in this process, in order."""
    return tuple(_COMPUTATIONS)


def call(
    fn: Callable[..., Any],
    tensors: Sequence[Tensor],
    *,
    static: dict[str, Hashable] | None = None,
    sharding: OpSharding | None = None,
    in_specs: Sequence[Spec] | None = None,
    out_specs: Sequence[Spec] | None = None,
) -> tuple[Tensor, ...]:
    """Calls `fn(*arrays, **static, interpret=...)` on XLA tensors, inside the current lazy graph.

    Args:
        fn: a module-level JAX function returning a tuple of arrays. It gets `interpret=True` on the
            "cpu" target. With a sharding it runs once per device on local shapes, inside
            `jax.shard_map`, where the mesh's axis names are usable in collectives.
        tensors: XLA tensors, global shapes. float64, complex and int64 are refused: TPUs have none
            of them.
        static: hashable keyword arguments of `fn`.
        sharding: the mesh of the call; None calls `fn` on whole arrays. Its `target` is what `fn`
            is lowered for.
        in_specs, out_specs: with a sharding, one spec a tensor: one entry a dimension.

    Returns:
        a tuple of XLA tensors.

    Raises:
        ValueError: a function that is not module-level, an unhashable static argument, a tensor
            elsewhere or of an unsupported dtype; each names the argument.
    """
    import torch_xla

    _check_function(fn)
    for i, tensor in enumerate(tensors):
        if tensor.device.type != "xla":
            raise ValueError(
                f"{fn.__qualname__}: tensor {i} {tuple(tensor.shape)} is on {tensor.device}, "
                "expected an XLA device; move it with .to('xla')"
            )
        if tensor.dtype not in _JAX_DTYPE:
            raise ValueError(
                f"{fn.__qualname__}: tensor {i} {tuple(tensor.shape)} has dtype {tensor.dtype}, "
                f"which TPU kernels do not take; cast it to one of {sorted(map(str, _JAX_DTYPE))}"
            )
    signature = tuple((tuple(t.shape), _JAX_DTYPE[t.dtype]) for t in tensors)
    static_items = tuple(sorted((static or {}).items()))
    for argument, value in static_items:
        try:
            hash(value)
        except TypeError as error:
            raise ValueError(
                f"{fn.__qualname__}: static argument {argument}={value!r} must be hashable "
                f"({error}); pass tuples, not lists"
            ) from None
    specs = None if sharding is None else (tuple(in_specs), tuple(out_specs))
    target = (sharding and sharding.target) or runtime_target()
    lowering = Lowering(fn, static_items, signature, sharding, specs, target)
    if lowering not in _COMPUTATIONS:
        _COMPUTATIONS[lowering] = _computation(lowering)
    name, computation = _COMPUTATIONS[lowering]
    return tuple(torch_xla._XLAC._xla_user_computation(f"xla::{name}", list(tensors), computation))


def call_by_rows(
    fn: Callable[..., Any],
    tensors: Sequence[Tensor],
    sharding: OpSharding | None,
    *,
    num_outputs: int,
) -> tuple[Tensor, ...]:
    """`call` for a function whose operands and results are all split by rows: each device runs it
    on its own.

    Results are 2-D. Raises as `call` does.
    """
    if sharding is None:
        return call(fn, tensors)
    return call(
        fn,
        tensors,
        sharding=sharding,
        in_specs=[sharding.row_spec(t.ndim) for t in tensors],
        out_specs=[sharding.row_spec(2)] * num_outputs,
    )


def jax_dtype(dtype: torch.dtype) -> str:
    """The JAX name of a torch dtype. Raises ValueError for one that TPU kernels do not take."""
    if dtype not in _JAX_DTYPE:
        raise ValueError(f"{dtype} has no TPU kernel; use one of {sorted(map(str, _JAX_DTYPE))}")
    return _JAX_DTYPE[dtype]


def runtime_target() -> Target:
    """The lowering target of the torch_xla runtime of this process: "tpu" on a TPU, else "cpu"."""
    import torch_xla.runtime as xr

    return "tpu" if xr.device_type() == "TPU" else "cpu"


def lower(
    fn: Callable[..., Any],
    signature: Sequence[tuple[tuple[int, ...], str]],
    *,
    static: dict[str, Hashable] | None = None,
    sharding: OpSharding | None = None,
    in_specs: Sequence[Spec] | None = None,
    out_specs: Sequence[Spec] | None = None,
    target: Target,
) -> Any:
    """Lowers `fn` for a target without torch_xla: a `jax.stages.Lowered` on (shape, dtype name)
    arguments.

    What `call` compiles into the graph; also the entry for ahead-of-time checks of single kernels.
    """
    import jax
    from jax._src.interpreters import mlir
    from jax.sharding import AbstractMesh, PartitionSpec

    bound = functools.partial(fn, **(static or {}), interpret=target == "cpu")
    bound.__name__ = fn.__name__  # the name of the HLO module
    if sharding is not None:
        axes, sizes = zip(*sharding.mesh, strict=True)
        bound = jax.shard_map(
            bound,
            mesh=AbstractMesh(sizes, axes),
            in_specs=tuple(PartitionSpec(*spec) for spec in in_specs),
            out_specs=tuple(PartitionSpec(*spec) for spec in out_specs),
            check_vma=False,
        )
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in signature]
    # torch_xla's partitioner is GSPMD; jax would emit Shardy's dialect.
    with _config(jax_use_shardy_partitioner=False):
        traced = jax.jit(bound, keep_unused=True).trace(*arguments)
        parameters = mlir.LoweringParameters(
            for_export=target == "tpu", export_ignore_forward_compatibility=False
        )
        return traced.lower(lowering_platforms=(target,), _private_parameters=parameters)


def _computation(lowering: Lowering) -> tuple[str, Any]:
    import torch_xla
    import torch_xla.core.xla_builder as xb

    # torch_xla must own the device before JAX is imported
    # (https://github.com/pytorch/xla/issues/8793).
    torch_xla._XLAC._init_computation_client()
    fn = lowering.fn
    in_specs, out_specs = lowering.specs or (None, None)
    module = lower(
        fn,
        lowering.signature,
        static=dict(lowering.static),
        sharding=lowering.sharding,
        in_specs=in_specs,
        out_specs=out_specs,
        target=lowering.target,
    ).compiler_ir("hlo")
    module = module.as_serialized_hlo_module_proto()
    name = "_".join((*fn.__module__.split(".")[-2:-1], fn.__name__))  # gmm/kernel.py: gmm_gmm
    return name, xb.computation_from_module_proto(name, module)


def _check_function(fn: Callable[..., Any]) -> None:
    name, module = getattr(fn, "__name__", ""), sys.modules.get(getattr(fn, "__module__", None))
    if getattr(module, name, None) is not fn:
        raise ValueError(
            f"{fn!r} must be a module-level function: its identity is the key of the compiled "
            "computation, and a closure, lambda, method or partial would be lowered again at every "
            "step; pass its variables as `static`"
        )


def _config(**options: Any):
    """JAX options for the duration of a `with`, restored after."""
    import contextlib

    import jax

    @contextlib.contextmanager
    def scope():
        before = {name: getattr(jax.config, name) for name in options}
        for name, value in options.items():
            jax.config.update(name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)

    return scope()
