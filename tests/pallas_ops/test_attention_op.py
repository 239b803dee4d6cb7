"""attention: the reference against plain autograd, the kernels against the reference, v6e."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_xla
from hypothesis import example, given, settings
from torch.library import opcheck

from pallas_ops import OpSharding, attention, bridge
from pallas_ops.attention import kernel, kernel_flash, reference
from pallas_ops.attention.blocks import Band, Flash, choose_backward, choose_forward
from pallas_ops.attention.shapes import GEMMA4_26B, TINY
from tests.pallas_ops.aot import compile_elsewhere
from tests.pallas_ops.simulated import STRICT, without_races
from torch_gemma4.attention import attend

OPS = torch.ops.pallas_ops
TWO = OpSharding(mesh=(("fsdp", 2),), row_axes=("fsdp",))
tiny_shapes = pytest.mark.parametrize("shape", TINY, ids=lambda shape: shape.name)


def operands(shape, dtype=torch.float32):
    """q, k, v, and a cotangent."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    return [torch.randn(shape.batch, shape.length, n, shape.head_dim, dtype=dtype) for n in heads]


def documents(batch, length, mean=7):
    """Ids of packed documents, one-token ones among them."""
    starts = torch.rand(batch, length) < 1 / mean
    return starts.cumsum(1).int()


def run(function, q, k, v, dout, segment_ids, *, device="cpu"):
    """out, dq, dk, dv, on the CPU in the end."""
    leaves = [x.detach().to(device).requires_grad_() for x in (q, k, v)]
    segment_ids = None if segment_ids is None else segment_ids.to(device)
    out = function(*leaves, segment_ids=segment_ids)
    grads = torch.autograd.grad(out, leaves, dout.to(device))
    torch_xla.sync()
    return [x.detach().cpu() for x in (out, *grads)]


def compare(window, *tensors, segment_ids):
    """The kernels err at most twice as much as plain torch in the same dtype, and an ulp of the
    largest element (fp32, which sums in another order: 32). A result that is exactly zero, as dq of
    a lone token, is the difference of equal terms: of `out`'s size, not of its own."""
    ours = functools.partial(attention, window=window)
    plain = functools.partial(attend, window=window)
    exact = run(plain, *[x.double() for x in tensors], segment_ids)
    baseline = run(plain, *tensors, segment_ids)
    results = run(ours, *tensors, segment_ids, device="xla")
    for got, theirs, want in zip(results, baseline, exact, strict=True):
        assert (got.dtype, got.shape) == (theirs.dtype, theirs.shape)
        ulps = 32 if got.dtype == torch.float32 else 1
        size = want.abs().max() or exact[0].abs().max()
        floor = ulps * torch.finfo(got.dtype).eps * size
        assert (got - want).abs().max() <= 2 * (theirs - want).abs().max() + floor


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@tiny_shapes
def test_reference_is_plain_attention(shape, packed, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK", 16)  # several blocks, the last one ragged
    tensors = operands(shape, torch.float64)
    segment_ids = documents(shape.batch, shape.length) if packed else None
    got = run(functools.partial(attention, window=shape.window), *tensors, segment_ids)
    want = run(functools.partial(attend, window=shape.window), *tensors, segment_ids)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_reference_rounds_bf16_no_worse_than_plain_attention():
    tensors = operands(TINY[3], torch.bfloat16)
    plain = functools.partial(attend, window=5)
    exact = run(plain, *[x.double() for x in tensors], None)
    baseline = run(plain, *tensors, None)
    results = run(functools.partial(attention, window=5), *tensors, None)
    for got, theirs, want in zip(results, baseline, exact, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - want).abs().max() <= 2 * (theirs - want).abs().max()


@pytest.mark.parametrize("window", [None, 3])
def test_gradcheck(window):
    q, k, v = (torch.randn(2, 7, n, 3).double().requires_grad_() for n in (4, 2, 2))
    segment_ids = torch.tensor([[5, 5, 5, 5, 2, 9, 9], [0] * 7], dtype=torch.int32)
    function = functools.partial(attention, window=window, segment_ids=segment_ids)
    assert torch.autograd.gradcheck(function, (q, k, v))


def test_equal_ids_that_are_apart_are_one_segment():
    q, k, v, _ = operands(TINY[1])
    ids = torch.arange(13, dtype=torch.int32).remainder(2).expand(2, -1)
    out = attention(q, k, v, window=None, segment_ids=ids)
    even = [x[:, ::2] for x in (q, k, v)]
    torch.testing.assert_close(out[:, ::2], attention(*even, window=None))


def test_differentiable_once():
    q, k, v, _ = operands(TINY[1])
    q.requires_grad_()
    (dq,) = torch.autograd.grad(attention(q, k, v, window=None).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        dq.sum().backward()


@pytest.mark.parametrize("sharding", [None, TWO], ids=["one device", "two shards"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_opcheck(dtype, packed, sharding):
    q, k, v, dout = operands(TINY[1], dtype)
    rest = (documents(2, 13) if packed else None, 5, "" if sharding is None else TWO.to_json())
    out, lse = OPS.attention(q, k, v, *rest)
    opcheck(OPS.attention.default, (q.requires_grad_(), k.requires_grad_(), v, *rest))
    args = [x.detach() for x in (q, k, v, out, lse, dout)]
    opcheck(OPS.attention_backward.default, (*args, *rest))


NO_INT32 = torch.zeros(2, 13, dtype=torch.int64)
EXTREMES = torch.tensor([[-(2**31)] * 6 + [2**31 - 1] * 7] * 2, dtype=torch.int32)
ERRORS = {
    "rank": ({"q": torch.zeros(2, 13, 8)}, r"q has shape \[2, 13, 8\]; expected \[B, S, N, H\]"),
    "length": ({"k": torch.zeros(2, 12, 2, 8)}, r"k has shape .* expected \[2, 13, 2, 8\]"),
    "head size": ({"v": torch.zeros(2, 13, 2, 9)}, r"v has shape .* expected \[2, 13, 2, 8\]"),
    "heads": (
        {"k": torch.zeros(2, 13, 3, 8), "v": torch.zeros(2, 13, 3, 8)},
        "q has 4 heads, which the 3 heads of k do not divide",
    ),
    "mixed dtypes": ({"v": torch.zeros(2, 13, 2, 8).half()}, "v is torch.float16 but q is"),
    "no float": ({"q": torch.zeros(2, 13, 4, 8).int()}, "q is torch.int32; convert it to a float"),
    "window": ({"window": 0}, "window is 0; it counts the query itself"),
    "ids' dtype": ({"segment_ids": NO_INT32}, r"segment_ids is torch.int64; convert it by \.to"),
    "ids' shape": ({"segment_ids": NO_INT32[:1].int()}, r"expected \[2, 13\], one id a token"),
    "extreme ids": ({"segment_ids": EXTREMES}, "holds both -2147483648 and 2147483647, one of"),
    "batch": (
        {"sharding": OpSharding((("fsdp", 4),), ("fsdp",))},
        "batch.* has 2 rows, which 4 row shards",
    ),
    "device": ({"segment_ids": torch.zeros(2, 13).int().to("meta")}, "segment_ids is on meta"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_arguments(case):
    changes, message = ERRORS[case]
    q, k, v, _ = operands(TINY[1])
    arguments = {"q": q, "k": k, "v": v, "window": None, **changes}
    with pytest.raises(ValueError, match=message):
        attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@tiny_shapes
def test_kernels_err_no_more_than_plain_torch(shape, dtype):
    segment_ids = documents(shape.batch, shape.length, mean=40)
    compare(shape.window, *operands(shape, dtype), segment_ids=segment_ids)


def test_kernels_without_segments():
    compare(40, *operands(TINY[5]), segment_ids=None)


@pytest.mark.parametrize("ids", [(-(2**31), 5), (2**31 - 1, -(2**31) + 1), (-1, 2**31 - 1)])
def test_any_ids_will_do(ids):
    # The first keys' band begins before the sequence, where the kernel has a segment of its own.
    segment_ids = torch.tensor(ids, dtype=torch.int32).repeat_interleave(100)[None]
    compare(40, *operands(TINY[5]), segment_ids=segment_ids)


def test_no_token():
    q, k = torch.zeros(1, 0, 4, 8), torch.zeros(1, 0, 2, 8)
    for device in ("cpu", "xla"):
        results = run(functools.partial(attention, window=3), q, k, k, q, None, device=device)
        assert [x.shape for x in results] == [x.shape for x in (q, q, k, k)]


LENGTH = 300
boundaries = st.lists(st.sampled_from([1, 2, 127, 128, 129, 255, 256, 257, 299]), unique=True)


@settings(max_examples=10)
@given(boundaries, st.sampled_from([None, 150]))
@example([], 150)
@example(list(range(1, LENGTH)), None)
@example(list(range(1, LENGTH)), 150)
def test_whatever_the_documents(starts, window):
    tensors = [torch.randn(1, LENGTH, n, 8) for n in (2, 1, 1, 2)]
    segment_ids = torch.zeros(1, LENGTH, dtype=torch.int32)
    segment_ids[:, starts] = 1
    compare(window, *tensors, segment_ids=segment_ids.cumsum(1).int())


@pytest.mark.parametrize("window", [None, 130], ids=["flash", "band"])
def test_hidden_keys_reach_nothing(window):
    shape = TINY[6]
    q, k, v, dout = operands(shape)
    segment_ids = torch.ones(1, shape.length, dtype=torch.int32)
    segment_ids[:, 290:] = 2
    function = functools.partial(attention, window=window)
    before = run(function, q, k, v, dout, segment_ids, device="xla")
    hidden = slice(0, 290)  # to the queries from 290 on
    for x in (q, k, v, dout):
        x[:, hidden] = 1e3 * torch.randn(x[:, hidden].shape)
    after = run(function, q, k, v, dout, segment_ids, device="xla")
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:, 290:], new[:, 290:])
        assert not torch.equal(old[:, :290], new[:, :290])
    # And the future, to the queries before it.
    k[:, 100:290], v[:, 100:290] = 7.0, -7.0
    later = run(function, q, k, v, dout, segment_ids, device="xla")
    assert torch.equal(after[0][:, :100], later[0][:, :100])


# Kernels in the TPU interpreter, in blocks that leave remainders everywhere.
BLOCKS = {
    "band, ragged": Band(8, 11),
    "band, whole blocks": Band(8, 8),
    "flash, wide keys": Flash(8, 16, None),
    "flash, window, in parts": Flash(16, 8, 11, 16),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_tpu_interpreter(case):
    blocks = BLOCKS[case]
    q, k, v, dout = (torch.randn(1, 21, n, 10) for n in (4, 2, 2, 4))
    segment_ids = documents(1, 21, mean=12)
    plain = functools.partial(attend, window=blocks.window)
    want = run(plain, *[x.double() for x in (q, k, v, dout)], segment_ids)
    options = {"window": blocks.window, "blocks": blocks, "interpret": STRICT}
    arrays = [jnp.asarray(x.numpy()) for x in (q, k, v, dout, segment_ids)]

    @jax.jit
    def both(q, k, v, dout, segment_ids):
        out, lse = kernel.attention(q, k, v, segment_ids, **options)
        return out, *kernel.attention_backward(q, k, v, out, lse, dout, segment_ids, **options)

    with without_races():
        results = [np.asarray(x) for x in both(*arrays)]
    for got, exact in zip(results, want, strict=True):
        np.testing.assert_allclose(got, exact.numpy(), rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "blocks",
    [Flash(8, 16, None), Flash(16, 8, None), Flash(8, 8, 11), Flash(16, 8, 9), Flash(8, 32, 1)],
    ids=str,
)
def test_flash_steps_cover_what_is_visible_and_no_more(blocks):
    length = 64
    steps = kernel_flash.pairs(blocks, length)
    query, key = np.arange(length)[:, None], np.arange(length)
    seen = (key <= query) & (query - key < (blocks.window or length))
    tiles = seen.reshape(length // blocks.block_q, blocks.block_q, -1, blocks.block_k)
    assert set(map(tuple, steps[:2].T)) == set(zip(*tiles.any((1, 3)).nonzero(), strict=True))
    flags = steps[2]
    assert sum(flags & kernel_flash.FIRST != 0) == sum(flags & kernel_flash.LAST != 0)
    assert len(set(steps[0])) == sum(flags & kernel_flash.FIRST != 0)


def test_blocks_of_the_26b_model():
    local, whole = GEMMA4_26B
    for choose in (choose_forward, choose_backward):
        band = choose(local.length, 2, local.head_dim, local.window, 2)
        assert isinstance(band, Band)
        assert band.num_blocks * band.block <= 1.3 * local.window
        flash = choose(whole.length, 8, whole.head_dim, None, 2)
        steps = kernel_flash.pairs(flash, whole.length).shape[1]
        area = steps * flash.block_q * flash.block_k * whole.batch * whole.num_heads
        assert area <= 1.1 * whole.num_pairs
    # One call holds the gradients of all keys; of four times as many it does not.
    assert flash.max_keys >= whole.length
    longer = choose_backward(4 * whole.length, 8, whole.head_dim, None, 2)
    assert longer.max_keys < 4 * whole.length
    # A window whose band is beyond VMEM.
    assert isinstance(choose_backward(2**17, 8, 512, 2**15, 2), Flash)
    assert choose_forward(100, 1, 8, 100, 4).window is None
    with pytest.raises(ValueError, match=r"no blocks of attention .* fit .* name a chip with more"):
        choose_backward(2**14, 64, 2**15, None, 4)


def test_sharded_call_is_local():
    shapes = [((4, 256, n, 8), "float32") for n in (4, 2, 2)]
    rows = [TWO.row_spec(4)] * 3
    lowered = bridge.lower(
        kernel.attention,
        shapes,
        static={"window": 100},
        sharding=TWO,
        in_specs=rows,
        out_specs=[TWO.row_spec(4), TWO.row_spec(3)],
        target="tpu",
    )
    text = lowered.as_text()
    (call,) = [line for line in text.splitlines() if "tpu_custom_call" in line]
    assert "tensor<2x256x512xf32>" in call and "tensor<4x256x512xf32>" not in call
    assert not any(name in text for name in ("all_gather", "all_reduce", "collective_permute"))


PROGRAMS = """
from pallas_ops.attention import kernel
from pallas_ops.attention.shapes import GEMMA4_26B

def programs():
    found = {}
    for s in GEMMA4_26B:
        q = ((s.batch, s.length, s.num_heads, s.head_dim), "bfloat16")
        k = ((s.batch, s.length, s.num_kv_heads, s.head_dim), "bfloat16")
        lse = ((s.batch, s.num_heads, s.length), "float32")
        ids = ((s.batch, s.length), "int32")
        static = {"window": s.window}
        found[s.name] = aot.Program(kernel.attention, (q, k, k, ids), static)
        signature = (q, k, k, q, lse, q, ids)
        found[s.name + " backward"] = aot.Program(kernel.attention_backward, signature, static)
    return found
"""


@pytest.mark.slow
@pytest.mark.libtpu
def test_production_shapes_compile_for_v6e():
    compiled = compile_elsewhere(PROGRAMS)
    assert list(compiled) == ["local", "local backward", "global", "global backward"]
    for name, result in compiled.items():
        assert "error" not in result, (name, result["error"])  # VMEM beyond its limit is one
    assert sum(result["seconds"] for result in compiled.values()) < 120
