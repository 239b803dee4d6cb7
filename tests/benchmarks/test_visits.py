"""When regions of a kernel's body run, found from the body."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.attention import ours, splash
from pallas_ops.attention.shapes import GEMMA4_26B
from train.compile.static.grid_steps import only_call
from train.compile.static.step_time import Visit
from train.compile.static.visits import find_visits, match_visits

ROW = ((8, 128), "float32")


def runs(call):
    """[num_steps] of every visit."""
    steps = call.steps()
    found = find_visits(call, steps)
    return [np.broadcast_to(v.times(steps), steps.num_steps).astype(int).tolist() for v in found]


def call_kernel(kernel, *arrays, grid, scalars=0):
    spec = pl.BlockSpec((8, 128), lambda *_: (0, 0))
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalars,
            grid=grid,
            in_specs=[spec] * (len(arrays) - scalars),
            out_specs=spec,
        ),
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
    )(*arrays)


def nested(x, *, interpret):
    del interpret

    def kernel(flags, x_ref, out_ref):
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(flags[i] + j > 1)
        def _():
            @pl.loop(0, 3)
            def _(_):
                out_ref[...] += x_ref[...]

            @pl.when(j == pl.num_programs(1) - 1)
            def _():
                out_ref[...] = x_ref[...]

        @pl.when(x_ref[0, 0] > 0)
        def _():
            out_ref[...] = -x_ref[...]

        @pl.loop(0, flags[i])
        def _(_):
            out_ref[...] *= 2

    return (call_kernel(kernel, np.array([0, 2], np.int32), x, grid=(2, 3), scalars=1),)


def test_branches_and_loops_nest_and_what_data_decides_is_taken_to_run():
    call = only_call(functools.partial(nested, interpret=False), (ROW,), {})
    outer, loop, inner, data, turns = runs(call)
    assert outer == [0, 0, 1, 1, 1, 1]
    assert loop == [3] * 6 and inner == [0, 0, 1, 0, 0, 1]  # each time that `outer` runs
    assert data == [1] * 6
    assert turns == [0, 0, 0, 2, 2, 2]
    found = find_visits(call, call.steps())
    assert [visit.is_assumed for visit in found] == [False, False, False, True, False]
    assert [visit.is_static_loop for visit in found] == [False, True, False, False, False]


def by_count(x_ref, out_ref):
    @pl.loop(0, x_ref[0, 0].astype(jnp.int32))
    def _(_):
        out_ref[...] += x_ref[...]


def by_condition(x_ref, out_ref):
    out_ref[0, 0] = jax.lax.while_loop(lambda state: state < 9.0, lambda state: state * 2, 1.0)


@pytest.mark.parametrize("kernel", [by_count, by_condition])
def test_a_loop_that_data_ends_is_refused(kernel):
    call = only_call(lambda x: (call_kernel(kernel, x, grid=(2,)),), (ROW,), {})
    with pytest.raises(ValueError, match="turns as often as data says"):
        runs(call)


def test_a_body_does_not_see_the_dimensions_of_vmap():
    def kernel(x_ref, out_ref):
        @pl.when(pl.program_id(0) == 1)
        def _():
            out_ref[...] = x_ref[...]

    def fn(x):
        return (jax.vmap(lambda each: call_kernel(kernel, each, grid=(3,)))(x),)

    call = only_call(fn, (((2, 8, 128), "float32"),), {})
    assert runs(call) == [[0, 1, 0, 0, 1, 0]]


def test_unrolled_loops_leave_no_region():
    branch, loop = Visit("branch", len), Visit("loop", len, is_static_loop=True)
    assert match_visits((branch, loop), 2) == (branch, loop)
    assert match_visits((branch, loop), 1) == (branch,)
    assert match_visits((loop,), 0) == ()
    assert match_visits((branch, loop), 3) is None


def test_attention_kernels_run_their_parts_as_often_as_their_design_says():
    local, whole = (ours(shape) for shape in GEMMA4_26B)
    sums = [sum(map(sum, runs(call)[-1:])) for v in (local, whole) for call in v.backward]
    # Every query block of every sequence and key head; every key block once a sequence and head.
    assert sums == [2 * 8 * 64, 2 * 2 * 32]


@pytest.mark.parametrize(("shape", "block", "visited"), [(0, 512, 2976), (1, 1024, 4352)])
def test_splash_attention_computes_the_blocks_that_its_mask_leaves(shape, block, visited):
    variant = splash(GEMMA4_26B[shape], block, 512)
    for call in (*variant.forward, *variant.backward):
        assert visited in [sum(times) for times in runs(call)]
