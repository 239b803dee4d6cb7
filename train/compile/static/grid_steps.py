"""What each grid step of a Pallas call copies, from the call itself: its grid and index maps.

The JAX function is traced on shapes; the few operands that decide the steps (group sizes) are given
as values, and everything that depends on them alone is evaluated: dynamic grid bounds and
scalar-prefetch operands. Index maps are then evaluated at every grid point. Invariants, which are
those of Mosaic's pipeline:

- an input block is fetched for a step when its index differs from the step before;
- an output block is written after a step when its index differs from the step after;
- a block at the edge of an array copies what is inside the array, in whole memory tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from train.compile.static.schedule import Copy, window_bytes

_LARGE = 1 << 20
"""Elements from which a value is left unknown: no decision about steps is that long."""
_LANES = 128
_SUBLANES = 8


@dataclass(frozen=True)
class GridSteps:
    """One Pallas call, step by step, the last grid dimension fastest."""

    grid: tuple[int, ...]
    """Steps a dimension."""
    ids: tuple[np.ndarray, ...]
    """[num_steps] `pl.program_id` of each dimension."""
    scalars: tuple[np.ndarray, ...]
    """Scalar-prefetch operands."""
    blocks: tuple[tuple[int, ...], ...]
    """Block shapes of inputs and outputs."""
    block_bytes: tuple[int, ...]
    """Bytes of one whole block in HBM."""
    fetched: np.ndarray
    """[num_steps] bytes that must arrive before the step."""
    written: np.ndarray
    """[num_steps] bytes that leave after the step."""

    @property
    def num_steps(self) -> int:
        """Grid points."""
        return len(self.fetched)


@dataclass(frozen=True)
class PallasCall:
    """One Pallas call of a traced function."""

    params: dict[str, Any]
    """Of the equation: name, grid, index maps, body."""
    operands: tuple[Any, ...]
    """Values of its operands, None where unknown."""
    signature: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and dtype name of its operands: dynamic grid bounds, scalars, arrays."""
    results: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and dtype name of its results."""

    @property
    def name(self) -> str:
        """Of the kernel."""
        return self.params["jaxpr"].debug_info.func_name

    @property
    def num_static_steps(self) -> int | None:
        """Grid points, None where operands decide them."""
        grid = self.params["grid_mapping"].grid
        return math.prod(grid) if all(isinstance(size, int) for size in grid) else None

    @property
    def scratch(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Shape and item size of the arrays that the kernel keeps between steps, in VMEM or SMEM;
        semaphores are not among them."""
        mapping = self.params["grid_mapping"]
        body = self.params["jaxpr"].invars
        kept = body[len(body) - mapping.num_scratch_operands :]
        kinds = [getattr(v.aval.dtype, "itemsize", None) for v in kept]
        return tuple(
            (tuple(v.aval.shape), size)
            for v, size in zip(kept, kinds, strict=True)
            if size is not None
        )

    def steps(self, *, own_copies: bool = False) -> GridSteps:
        """Its grid, step by step; with `own_copies` those blocks are left out that the kernel
        copies itself. Raises ValueError as `trace_grid`."""
        return _steps(self.params, list(self.operands), own_copies)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """The call alone, as a JAX function of its operands."""
        from jax._src.pallas.pallas_call import pallas_call_p

        return tuple(pallas_call_p.bind(*arrays, **self.params))


def trace_grid(
    fn: Callable[..., Any],
    signature: Sequence[tuple[tuple[int, ...], str]],
    known: Mapping[int, np.ndarray],
) -> GridSteps:
    """Steps of the only Pallas call in `fn`, an argument a (shape, dtype name).

    Args:
        fn: a JAX function of arrays, with a Pallas call that is not interpreted.
        signature: shapes of its arguments.
        known: values of arguments by position.

    Raises:
        ValueError: no or several Pallas calls, one whose steps depend on an unknown argument, or a
            block that the pipeline does not copy.
    """
    return only_call(fn, signature, known).steps()


def only_call(
    fn: Callable[..., Any],
    signature: Sequence[tuple[tuple[int, ...], str]],
    known: Mapping[int, np.ndarray],
) -> PallasCall:
    """The only Pallas call in `fn`; arguments as `trace_grid`. Raises ValueError for no or several
    Pallas calls."""
    calls = trace_calls(fn, signature, known)
    if len(calls) != 1:
        raise ValueError(f"{fn} has {len(calls)} Pallas calls, expected one; profile each alone")
    return calls[0]


def trace_calls(
    fn: Callable[..., Any],
    signature: Sequence[tuple[tuple[int, ...], str]],
    known: Mapping[int, np.ndarray],
    mesh: Sequence[tuple[str, int]] = (),
) -> list[PallasCall]:
    """Every Pallas call in `fn`, in order; arguments as `trace_grid`, with axes that collectives of
    `fn` name."""
    import jax

    traced = jax.make_jaxpr(fn, axis_env=list(mesh))(
        *(jax.ShapeDtypeStruct(*argument) for argument in signature)
    )
    arguments = [known.get(i) for i in range(len(signature))]
    calls: list[PallasCall] = []
    _evaluate(traced.jaxpr, traced.consts, arguments, calls)
    return calls


def _described(variables: Sequence[Any]) -> tuple[tuple[tuple[int, ...], str], ...]:
    return tuple((tuple(v.aval.shape), np.dtype(v.aval.dtype).name) for v in variables)


def _evaluate(jaxpr, consts, arguments, calls) -> list[Any]:
    """Values of a jaxpr's results, None where unknown; Pallas calls on the way are collected."""
    from jax.extend.core import Literal

    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))
    for eqn in jaxpr.eqns:
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        if eqn.primitive.name == "pallas_call":
            calls.append(
                PallasCall(
                    dict(eqn.params),
                    tuple(operands),
                    _described(eqn.invars),
                    _described(eqn.outvars),
                )
            )
            results = [None] * len(eqn.outvars)
        elif any(operand is None for operand in operands):
            results = [None] * len(eqn.outvars)
            if eqn.primitive.name in ("jit", "pjit"):
                inner = eqn.params["jaxpr"]
                results = _evaluate(inner.jaxpr, inner.consts, operands, calls)
        elif eqn.primitive.name == "axis_index":
            results = [np.int32(0)]  # one device stands for all
        elif any(math.prod(v.aval.shape) >= _LARGE for v in eqn.outvars):
            results = [None] * len(eqn.outvars)
        else:
            subfuns, params = eqn.primitive.get_bind_params(eqn.params)
            results = eqn.primitive.bind(*subfuns, *operands, **params)
            results = results if eqn.primitive.multiple_results else [results]
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def _steps(params: dict[str, Any], operands: list[Any], own_copies: bool) -> GridSteps:
    mapping = params["grid_mapping"]
    num_dynamic, num_scalars = mapping.num_dynamic_grid_bounds, mapping.num_index_operands
    decided = operands[: num_dynamic + num_scalars]
    if any(value is None for value in decided):
        raise ValueError(
            "the grid or a scalar-prefetch operand depends on an argument whose value is not "
            "given; add it to `known`"
        )
    bounds = iter(decided[:num_dynamic])
    grid = tuple(size if isinstance(size, int) else int(next(bounds)) for size in mapping.grid)
    scalars = decided[num_dynamic:]
    ids = tuple(axis.ravel().astype(np.int32) for axis in np.indices(grid))
    fetched = np.zeros(math.prod(grid), dtype=np.int64)
    written = np.zeros_like(fetched)
    shapes, sizes = [], []
    for i, block in enumerate(mapping.block_mappings):
        if own_copies and _stays_in_hbm(block):
            continue
        shape = _block_shape(block)
        indices = _block_indices(block, ids, scalars)
        nbytes = _copied_bytes(shape, indices, block.array_shape_dtype)
        changes = np.any(indices[1:] != indices[:-1], axis=1)
        if i < mapping.num_inputs:
            fetched += nbytes * np.append(True, changes)
        else:
            written += nbytes * np.append(changes, True)
        shapes.append(shape)
        sizes.append(
            int(_copied_bytes(shape, np.zeros((1, len(shape)), int), block.array_shape_dtype)[0])
        )
    return GridSteps(
        grid,
        ids,
        tuple(np.asarray(scalar) for scalar in scalars),
        tuple(shapes),
        tuple(sizes),
        fetched,
        written,
    )


def _block_shape(block) -> tuple[int, ...]:
    from jax.experimental import pallas as pl

    shape = []
    for dim in block.block_shape:
        if isinstance(dim, pl.Blocked):
            shape.append(dim.block_size)
        elif isinstance(dim, int):
            shape.append(dim)
        elif isinstance(dim, pl.Squeezed) or dim is None:
            shape.append(1)
        else:
            raise ValueError(f"{block.origin} has a block dimension {dim}; only Blocked is known")
    if _stays_in_hbm(block):
        raise ValueError(f"{block.origin} stays in HBM: its copies are not the pipeline's")
    return tuple(shape)


def _stays_in_hbm(block) -> bool:
    space = str(getattr(block.block_aval, "memory_space", None)).lower()
    return "any" in space or "hbm" in space


def _block_indices(block, ids, scalars) -> np.ndarray:
    """[num_steps, num_dims] block index of each step."""
    import jax
    import jax.numpy as jnp
    from jax._src.state.discharge import discharge_state
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

    closed = block.index_map_jaxpr
    pure, consts = discharge_state(closed.jaxpr, closed.consts)  # reads of references: of arrays
    evaluate = jaxpr_as_fun(ClosedJaxpr(pure, consts))
    num_dims = len(block.block_shape)

    def index(*point):
        return tuple(jnp.asarray(i, jnp.int32) for i in evaluate(*point, *scalars)[:num_dims])

    return np.stack([np.asarray(column) for column in jax.vmap(index)(*ids)], axis=1)


def _copied_bytes(shape, indices: np.ndarray, array) -> np.ndarray:
    """[num_steps] bytes of each block inside the array, in whole tiles of 8 x 128; arrays of fewer
    rows have lower tiles."""
    inside = np.minimum(np.array(array.shape) - indices * np.array(shape), np.array(shape))
    tile = [1] * (len(shape) - 1) + [_LANES]
    if len(shape) > 1:
        tile[-2] = min(_SUBLANES, 1 << (array.shape[-2] - 1).bit_length())
    return (-(-inside // tile) * tile).prod(axis=1) * np.dtype(array.dtype).itemsize


def window_steps(copies: Sequence[Copy]) -> GridSteps:
    """Steps of one fusion of XLA, from the windows that its own emitter writes beside its copies.

    Every operand that is copied in windows moves once, a window a step; what XLA keeps in VMEM for
    the whole fusion is not among them. Raises ValueError without windows.
    """
    copies = [copy for copy in copies if "iteration_bounds" in copy.window]
    if not copies:
        raise ValueError("no copy of this kernel names its windows: not a fusion of XLA's emitter")
    grid = copies[0].window["iteration_bounds"]
    num_steps = math.prod(grid)
    moved = {"hbm_to_vmem": np.zeros(num_steps, np.int64)}
    moved["vmem_to_hbm"] = np.zeros_like(moved["hbm_to_vmem"])
    sizes = []
    for copy in copies:
        window, whole = window_bytes(copy)
        before = np.arange(num_steps) * window
        moved[copy.direction] += np.clip(whole - before, 0, window)
        sizes.append(window)
    return GridSteps(
        grid,
        tuple(axis.ravel() for axis in np.indices(grid)),
        (),
        tuple(copy.window["window_bounds"] for copy in copies),
        tuple(sizes),
        moved["hbm_to_vmem"],
        moved["vmem_to_hbm"],
    )
