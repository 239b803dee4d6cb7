"""norm_rope: the reference against the model's norm and rotation, the kernels against it, v6e."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_xla
from jax.experimental.pallas import tpu as pltpu

from pallas_ops import OpSharding, norm_rope
from pallas_ops.norm_rope import kernel
from pallas_ops.norm_rope.shapes import TINY
from tests.pallas_ops.aot import compile_elsewhere
from tests.pallas_ops.simulated import without_races
from torch_gemma4.norm import rms_norm
from torch_gemma4.rope import apply_rope

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]
tiny_shapes = pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)


def operands(shape, dtype, *, own_tables=False):
    """x, weight, cos, sin and a cotangent; own_tables has tables for each sequence."""
    x, dout = (
        torch.randn(shape.batch, shape.length, shape.num_heads, shape.head_dim, dtype=dtype)
        for _ in range(2)
    )
    wide = torch.promote_types(dtype, torch.float32)
    weight = 1 + torch.randn(shape.head_dim, dtype=wide) if shape.scaled else None
    lead = (shape.batch,) if own_tables else ()
    angles = 10 * torch.randn(*lead, shape.length, 1, shape.head_dim // 2, dtype=wide)
    tables = (angles.cos(), angles.sin()) if shape.turned else (None, None)
    return x, weight, *tables, dout


def run(function, x, weight, cos, sin, dout, *, device="cpu"):
    """out, dx and, with a weight, dweight."""
    to = functools.partial(torch.Tensor.to, device=device)
    leaves = [to(t.detach()).requires_grad_() for t in (x, weight) if t is not None]
    tables = (None, None) if cos is None else (to(cos), to(sin))
    out = function(leaves[0], leaves[1] if weight is not None else None, *tables)
    grads = torch.autograd.grad(out, leaves, to(dout))
    torch_xla.sync()
    return [t.detach().cpu() for t in (out, *grads)]


ours = functools.partial(norm_rope, eps=EPS)


def plain(x, weight, cos, sin):
    normed = rms_norm(x, weight, EPS)
    return normed if cos is None else apply_rope(normed, cos, sin)


def doubles(tensors):
    return [None if t is None else t.double() for t in tensors]


@pytest.mark.parametrize("own_tables", [False, True])
@tiny_shapes
def test_reference_is_norm_then_rotation(shape, own_tables):
    given = operands(shape, torch.float64, own_tables=own_tables)
    torch.testing.assert_close(run(ours, *given), run(plain, *given), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", TINY[1:5], ids=lambda shape: shape.name)
def test_gradcheck(shape):
    *tensors, _ = operands(replace(shape, length=3), torch.float64)
    leaves = [t.requires_grad_() for t in tensors[:2] if t is not None]

    def function(*leaves):
        weight = leaves[1] if len(leaves) > 1 else None
        return ours(leaves[0], weight, *tensors[2:])

    torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("own_tables", [False, True], ids=["shared tables", "own tables"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@tiny_shapes
def test_kernels_round_once(shape, dtype, own_tables):
    given = operands(shape, dtype, own_tables=own_tables)
    exact, kinds = run(ours, *doubles(given)), run(ours, *given)
    for got, like, want in zip(run(ours, *given, device="xla"), kinds, exact, strict=True):
        assert (got.dtype, got.shape) == (like.dtype, like.shape)
        # Half a unit in the last place, and what fp32 sums in between lose.
        rounding = torch.finfo(got.dtype).eps / 2 * want.abs()
        slack = 64 * torch.finfo(torch.float32).eps * want.abs().max()
        assert ((got - want).abs() <= rounding + slack).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rounding(dtype):
    """Closer to the exact value than rounding between norm and rotation allows."""
    given = operands(TINY[5], dtype)
    exact = run(ours, *doubles(given))
    errors = [(run(function, *given)[0] - exact[0]).abs().mean() for function in (ours, plain)]
    assert errors[0] <= (0.8 if dtype == torch.bfloat16 else 1.0) * errors[1]


def test_two_shards_add_their_weight_gradients():
    two = OpSharding(mesh=(("fsdp", 2),), row_axes=("fsdp",))
    given = operands(TINY[1], torch.float64)
    split = run(functools.partial(ours, sharding=two), *given)
    torch.testing.assert_close(split, run(ours, *given), rtol=1e-12, atol=1e-12)
    # With a copy of the weight each, they keep their gradients apart.
    x, weight, *rest = given
    out, dx, apart = run(functools.partial(ours, sharding=two), x, torch.stack([weight] * 2), *rest)
    torch.testing.assert_close([out, dx, apart.sum(0)], split, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(apart[0], apart[1])


PARAMS = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="uninitialized"
)


@pytest.mark.parametrize("length", [5, 24, 37])
def test_tpu_interpreter(length, monkeypatch):
    """Rows beyond the sequence are NaN here."""
    monkeypatch.setattr(kernel, "ROWS", 16)
    shape = replace(TINY[1], length=length)
    x, weight, cos, sin, dout = given = operands(shape, torch.float32)
    want = run(ours, *doubles(given))
    arrays = [jnp.asarray(t.numpy()) for t in (dout, x, weight, cos[None], sin[None])]
    options = {"scaled": True, "turned": True, "eps": EPS, "interpret": PARAMS}

    @jax.jit
    def both(dout, *operands):
        (out,) = kernel.norm_rope(*operands, **options)
        return out, *kernel.norm_rope_backward(dout, *operands, **options)

    with without_races(PARAMS):
        results = [np.asarray(t) for t in both(*arrays)]
    for got, exact in zip(results, want, strict=True):
        np.testing.assert_allclose(got.reshape(exact.shape), exact.numpy(), rtol=0, atol=2e-5)


BAD = {
    "rank": ({"x": torch.zeros(2, 3, 4)}, r"x has shape \[2, 3, 4\]; expected \[B, S, N, H\]"),
    "odd": ({"x": torch.zeros(2, 3, 4, 5)}, "the last dimension must be even"),
    "integer": ({"x": torch.zeros(2, 3, 4, 6, dtype=torch.int32)}, "x is torch.int32; convert"),
    "weight": ({"weight": torch.zeros(5)}, r"weight has shape \[5\]; expected \[6\]"),
    "one table": ({"sin": None}, "only cos is given; give cos and sin or none"),
    "table": ({"cos": torch.zeros(4, 1, 3)}, r"cos has shape \[4, 1, 3\]; expected \[3, 1, 3\] or"),
    "device": ({"weight": torch.zeros(6, device="meta")}, "weight is on meta but x is on cpu"),
    "batch": (
        {"sharding": OpSharding((("fsdp", 4),), ("fsdp",))},
        r"x \(its batch\) has 2 rows, which 4 row shards",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    change, message = BAD[case]
    given = {"x": torch.zeros(2, 3, 4, 6), "weight": torch.zeros(6)}
    given |= {"cos": torch.zeros(3, 1, 3), "sin": torch.zeros(3, 1, 3)} | change
    with pytest.raises(ValueError, match=message):
        norm_rope(**given, eps=EPS)


PROGRAMS = """
from pallas_ops.norm_rope import kernel
from pallas_ops.norm_rope.shapes import GEMMA4_26B

def programs():
    found = {}
    for s in GEMMA4_26B:
        x = ((s.batch, s.length, s.num_heads, s.head_dim), "bfloat16")
        weight = [((s.head_dim,), "float32")] * s.scaled
        tables = [((1, s.length, 1, s.head_dim // 2), "float32")] * 2 * s.turned
        static = {"scaled": s.scaled, "turned": s.turned, "eps": 1e-6}
        found[s.name] = aot.Program(kernel.norm_rope, (x, *weight, *tables), static)
        signature = (x, x, *weight, *tables)
        found[s.name + " backward"] = aot.Program(kernel.norm_rope_backward, signature, static)
    return found
"""


@pytest.mark.slow
@pytest.mark.libtpu
def test_production_shapes_compile_for_v6e():
    compiled = compile_elsewhere(PROGRAMS)
    assert len(compiled) == 12
    for name, result in compiled.items():
        assert "error" not in result, (name, result["error"])
    assert sum(result["seconds"] for result in compiled.values()) < 120
