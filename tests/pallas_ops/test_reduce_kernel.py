"""The kernel of combine, and of permute's gradient, in both interpreters and through torch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_xla

from pallas_ops import combine, permute, routing_plan
from pallas_ops.combine.kernel_reduce import reduce_rows
from pallas_ops.routing import reference, reference_windows
from tests.pallas_ops.simulated import without_races

OPS = torch.ops.pallas_ops


def zipf_ids(num_tokens, top_k, num_experts, skew):
    """Distinct experts a token, drawn by a Zipf law."""
    weights = (1 + torch.arange(num_experts)).double() ** -skew
    return torch.multinomial(weights.expand(num_tokens, -1), top_k).int()


def one_expert(num_tokens, top_k):
    return torch.full((num_tokens, top_k), 3, dtype=torch.int32)


def block_local(num_tokens, top_k, num_experts, block):
    first = torch.arange(num_tokens)[:, None] // block * top_k
    return ((first + torch.arange(top_k)) % num_experts).int()


# (block, ids, E, D)
CASES = {
    "skewed, last block not whole": (32, zipf_ids(100, 3, 9, 0.5), 9, 256),
    "one token": (8, zipf_ids(1, 2, 5, 0.0), 5, 128),
    "one expert owns everything": (32, one_expert(160, 2), 6, 128),
}
PUBLISHED = {
    "K 8, E 16": (128, zipf_ids(256, 8, 16, 0.0), 16, 256),
    "K 8, E 128": (128, zipf_ids(256, 8, 128, 0.0), 128, 128),
    "three blocks, E 9": (128, zipf_ids(384, 8, 9, 0.0), 9, 384),
    "K 8, skewed": (128, zipf_ids(256, 8, 32, 1.0), 32, 128),
    "K 6, two blocks of 256": (256, zipf_ids(512, 6, 12, 0.3), 12, 256),
    "K 2, E 5": (128, zipf_ids(256, 2, 5, 0.0), 5, 128),
    "K 2, E 128": (128, zipf_ids(256, 2, 128, 0.0), 128, 128),
    "each block its own experts": (32, block_local(256, 4, 16, 32), 16, 128),
    "K 1": (64, zipf_ids(640, 1, 4, 0.0), 4, 128),
}
slow = [pytest.param(case, marks=pytest.mark.slow) for case in PUBLISHED]


@functools.partial(jax.jit, static_argnames=("interpret", "num_tokens"))
def reduce(rows, weights, ring, fetch, *, num_tokens, interpret):
    return reduce_rows(rows, weights, ring, fetch, num_tokens=num_tokens, interpret=interpret)


def check(case, interpret, weights_dtype=jnp.float32):
    """The kernel's sums are the fp32 ones, each rounded once: within one bf16 ulp of them."""
    block, ids, num_experts, width = (CASES | PUBLISHED)[case]
    num_tokens = len(ids)
    _, _, _, ring, fetch = reference_windows.routing_windows(ids, num_experts, block=block)
    _, row_of_slot, _ = reference.routing_plan(ids, num_experts)
    draw = np.random.default_rng(0)
    rows = draw.standard_normal((ids.numel(), width)).astype(jnp.bfloat16)
    weights = None
    if weights_dtype is not None:
        weights = draw.standard_normal(ids.shape).astype(weights_dtype)
    tables = (ring.numpy(), fetch.numpy())
    out = reduce(rows, weights, *tables, num_tokens=num_tokens, interpret=interpret)
    out = np.asarray(out, np.float32)
    expected = np.zeros((num_tokens, width), np.float32)
    terms = np.zeros_like(expected)
    for k in range(ids.shape[1]):
        weight = np.float32(1) if weights is None else weights[:, k, None].astype(np.float32)
        term = weight * rows[row_of_slot[:, k].numpy()].astype(np.float32)
        expected += term
        terms += abs(term)
    rounded = expected.astype(jnp.bfloat16).astype(np.float32)
    # Equal, but where the order of fp32 operations decides the rounding: the next bf16 then, or
    # what fp32 leaves of terms that cancel (each of at most 2 K operations errs by 2^-24 of them).
    assert (out != rounded).mean() < 1e-3
    assert (abs(out - rounded) <= 2**-7 * abs(rounded) + 2**-20 * terms).all()


@pytest.mark.parametrize("case", [*CASES, *slow])
def test_sums_are_rounded_once(case):
    check(case, interpret=True)


@pytest.mark.parametrize("weights_dtype", [None, jnp.bfloat16], ids=["unit", "bf16"])
def test_other_weights(weights_dtype):
    check("one token", True, weights_dtype)


@pytest.mark.parametrize("case", [*CASES, *slow])
def test_nothing_unwritten_is_read_and_nothing_races(case):
    with without_races() as interpret:
        check(case, interpret=interpret)


def test_the_interpreter_sees_a_missing_copy(monkeypatch):
    # The control of the test above: without the last granule of each window, NaN is read.
    block, ids, num_experts, width = CASES["skewed, last block not whole"]
    _, _, _, ring, fetch = reference_windows.routing_windows(ids, num_experts, block=block)
    fetch[:, 2] -= (fetch[:, 2] > 0).int()
    rows = jnp.zeros((ids.numel(), width), jnp.bfloat16)
    tables = (ring.numpy(), fetch.numpy())
    with without_races() as interpret:
        out = reduce(rows, None, *tables, num_tokens=len(ids), interpret=interpret)
        assert np.isnan(np.asarray(out, np.float32)).any()


def test_ops_sum_by_a_plan_for_kernels_on_xla():
    ids = zipf_ids(40, 2, 5, 0.5)
    rows, weights = torch.randn(80, 128).bfloat16(), torch.rand(40, 2)
    plan = routing_plan(ids.to("xla"), 5, implementation="kernel", block=16)
    tables = list(plan.windows)
    found = [
        OPS.combine(rows.to("xla"), weights.to("xla"), tables, ""),
        OPS.unpermute(rows.to("xla"), tables, ""),
    ]
    torch_xla.sync()
    gathered = list(routing_plan(ids, 5)[1:3])
    expected = OPS.combine(rows, weights, gathered, ""), OPS.unpermute(rows, gathered, "")
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=2**-7, atol=1e-4)


@pytest.mark.exhaustive
def test_ops_follow_a_plan_for_kernels_on_xla():
    ids = zipf_ids(40, 2, 5, 0.5)
    x = torch.randn(40, 128).bfloat16()
    weights, dout = torch.rand(40, 2), torch.randn(40, 128).bfloat16()

    def run(device, implementation):
        plan = routing_plan(
            ids.to(device), 5, implementation=implementation, **OPTIONS[implementation]
        )
        leaves = [t.to(device).requires_grad_() for t in (x, weights)]
        rows = permute(leaves[0], plan)
        out = combine(rows, leaves[1], plan)
        grads = torch.autograd.grad(out, leaves, dout.to(device))
        torch_xla.sync()
        return [t.detach().cpu() for t in (rows, out, *grads)]

    expected, found = run("cpu", "gather"), run("xla", "kernel")
    assert torch.equal(found[0], expected[0])
    for got, want in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-2)
    torch.testing.assert_close(run("cpu", "kernel"), expected, rtol=0, atol=0)


OPTIONS = {"gather": {}, "kernel": {"block": 16}}
NARROW = torch.zeros(4, 100).bfloat16()


def test_a_named_kernel_runs_or_raises():
    plan = routing_plan(torch.zeros(4, 2, dtype=torch.int32), 1, implementation="kernel")
    message = "no kernel for this plan: rows have width 100; pad it .* implementation='gather'"
    with pytest.raises(ValueError, match=f"permute: {message}"):
        permute(NARROW, plan)
    with pytest.raises(ValueError, match=f"combine: {message}"):
        combine(NARROW.repeat(2, 1), torch.zeros(4, 2), plan)
    with pytest.raises(ValueError, match=r"rows are torch\.float32; convert them"):
        permute(torch.zeros(4, 128), plan)
