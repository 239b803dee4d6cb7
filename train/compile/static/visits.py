"""How often each step of a Pallas call runs each region of its body, from the body itself.

A region is a branch (`pl.when`, `lax.cond`) or a loop. Conditions and trip counts are evaluated at
every grid point, from program ids and scalar-prefetch operands. Regions come in program order, each
before those it holds, which is the order of the compiler's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from train.compile.static.grid_steps import GridSteps, PallasCall
from train.compile.static.step_time import Visit

_INLINED = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")


def find_visits(call: PallasCall, steps: GridSteps) -> tuple[Visit, ...]:
    """One visit a region of the body.

    Raises ValueError for a loop whose trip count depends on data.
    """
    body = call.params["jaxpr"]
    env: dict[Any, Any] = dict(zip(body.invars, steps.scalars, strict=False))
    # A body does not see the dimensions that vmap has put around its grid.
    mapping = call.params["grid_mapping"]
    seen = [i for i in range(len(steps.grid)) if i not in mapping.vmapped_dims]
    body_steps = replace(
        steps, grid=tuple(steps.grid[i] for i in seen), ids=tuple(steps.ids[i] for i in seen)
    )
    found: list[Visit] = []
    _walk(body, env, body_steps, found)
    return tuple(found)


def match_visits(visits: tuple[Visit, ...], num_regions: int) -> tuple[Visit, ...] | None:
    """Those of a body's visits that belong to the regions which the compiler left: all, or all but
    the loops that it may have unrolled. None where their number is another."""
    for kept in (visits, tuple(visit for visit in visits if not visit.is_static_loop)):
        if len(kept) == num_regions:
            return kept
    return None


def _walk(jaxpr: Any, env: dict[Any, Any], steps: GridSteps, found: list[Visit]) -> None:
    """`env` holds [num_steps] values of scalars, and whole scalar-prefetch operands by their
    references; a variable that is not in it is unknown."""
    from jax.extend.core import Literal

    def value(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else env.get(variable)

    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, [value(v) for v in eqn.invars]
        if name == "program_id":
            env[eqn.outvars[0]] = steps.ids[eqn.params["axis"]]
        elif name == "num_programs":
            env[eqn.outvars[0]] = np.int32(steps.grid[eqn.params["axis"]])
        elif name == "get":
            read = _read(eqn, operands)
            if read is not None:
                env[eqn.outvars[0]] = read
        elif name == "cond":
            _branches(eqn, operands, env, steps, found)
        elif name in ("scan", "while"):
            trips = _trips(eqn, operands)
            visit = _visit(f"loop {len(found)}", trips)
            found.append(replace(visit, is_static_loop=np.ndim(trips) == 0))
            _walk(
                _closed(eqn.params["jaxpr" if name == "scan" else "body_jaxpr"]), {}, steps, found
            )
        elif name in _INLINED:
            inner = _closed(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))
            bound = {v: o for v, o in zip(inner.invars, operands, strict=True) if o is not None}
            _walk(inner, bound, steps, found)
            for outer, result in zip(eqn.outvars, inner.outvars, strict=True):
                known = result.val if isinstance(result, Literal) else bound.get(result)
                if known is not None:
                    env[outer] = known
        elif all(v.aval.shape == () for v in (*eqn.invars, *eqn.outvars)) and not any(
            operand is None for operand in operands
        ):
            env.update(zip(eqn.outvars, _elementwise(eqn, operands), strict=True))


def _branches(eqn: Any, operands: list[Any], env: Any, steps: GridSteps, found: list) -> None:
    index, *arguments = operands
    for i, branch in enumerate(eqn.params["branches"]):
        inner = _closed(branch)
        if not inner.eqns:
            continue
        # A condition on data that is not known here is taken to hold.
        times = np.ones(steps.num_steps) if index is None else np.asarray(index).astype(int) == i
        visit = _visit(f"branch {len(found)}", times)
        found.append(replace(visit, is_assumed=index is None))
        bound = {v: o for v, o in zip(inner.invars, arguments, strict=True) if o is not None}
        _walk(inner, bound, steps, found)


def _trips(eqn: Any, operands: list[Any]) -> Any:
    if eqn.primitive.name == "scan":
        return np.float64(eqn.params["length"])
    # fori_loop whose bound is not static: carries (i, bound, ...) and turns while i < bound.
    condition = _closed(eqn.params["cond_jaxpr"])
    compared = [list(test.invars) for test in condition.eqns if test.primitive.name == "lt"]
    first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    bounds = operands[first : first + 2]
    is_counted = len(condition.eqns) == 1 and compared == [list(condition.invars[:2])]
    if not is_counted or any(bound is None for bound in bounds):
        raise ValueError("a loop of the kernel's body turns as often as data says")
    begin, end = map(np.asarray, bounds)
    return end - begin


def _visit(name: str, times: Any) -> Visit:
    return Visit(name, lambda _: times)


def _closed(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _read(eqn: Any, operands: list[Any]) -> Any:
    """A scalar out of a scalar-prefetch operand, None for other reads."""
    from jax import tree_util

    array = operands[0]
    if array is None or eqn.outvars[0].aval.shape != ():
        return None
    transforms = tree_util.tree_unflatten(eqn.params["tree"], operands[1:])
    if len(transforms) != 1 or any(i is None for i in operands[1:]):
        return None
    indices = tuple(np.asarray(i) for i in transforms[0].indices)
    return np.asarray(array)[indices]


def _elementwise(eqn: Any, operands: list[Any]) -> list[Any]:
    import jax

    subfuns, params = eqn.primitive.get_bind_params(eqn.params)

    def one(*scalars: Any) -> Any:
        result = eqn.primitive.bind(*subfuns, *scalars, **params)
        return result if eqn.primitive.multiple_results else [result]

    dtypes = [v.aval.dtype for v in eqn.invars]
    arrays = [np.asarray(o, dtype) for o, dtype in zip(operands, dtypes, strict=True)]
    axes = [0 if array.ndim else None for array in arrays]
    if all(axis is None for axis in axes):
        return [np.asarray(result) for result in one(*arrays)]
    return [np.asarray(result) for result in jax.vmap(one, in_axes=axes)(*arrays)]
