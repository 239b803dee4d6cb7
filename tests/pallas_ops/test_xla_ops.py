"""Ops on XLA tensors (Pallas kernels, interpreted) against the same ops on CPU tensors.

The CPU kernels are plain torch, held to independent references by the other tests of this folder.
In fp64 they give the exact result here, and in the op's own dtype the error to be matched.
"""

import itertools

import hypothesis.strategies as st
import pytest
import torch
import torch_xla
from hypothesis import example, given, settings

from pallas_ops import combine, gelu_gate, gmm, permute, routing_plan, tgmm
from pallas_ops.combine.shapes import TINY as COMBINE_SHAPES
from pallas_ops.gmm.shapes import KNOWN_ISSUES, TINY
from pallas_ops.routing.shapes import TINY as ROUTING_SHAPES
from pallas_ops.tgmm.shapes import TINY as TGMM_SHAPES

OPS = torch.ops.pallas_ops
DTYPES = [torch.float32, torch.bfloat16]
NAN = float("nan")


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def run(function, *operands, douts, device="cpu"):
    """Outputs, then the gradients of the floating operands, all on the CPU in the end."""
    operands = [t.to(device).requires_grad_(t.is_floating_point()) for t in operands]
    outputs = function(*operands)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [t for t in operands if t.requires_grad]
    grads = torch.autograd.grad(outputs, leaves, [dout.to(device) for dout in douts])
    torch_xla.sync()  # one program for all of them, forward and backward
    return [t.detach().cpu() for t in (*outputs, *grads)]


def wide(tensors):
    return [t.double() if t.is_floating_point() else t for t in tensors]


def compare(function, *operands, douts, one_rounding=False):
    """The kernels' results, after a check that each errs at most twice as much as plain torch.

    With `one_rounding`, also that no element of a bf16 result is off by more than its own rounding.
    """
    operands = [t.detach() for t in operands]
    exact = run(function, *wide(operands), douts=wide(douts))
    baseline = run(function, *operands, douts=douts)
    results = run(function, *operands, douts=douts, device="xla")
    for got, theirs, want in zip(results, baseline, exact, strict=True):
        assert (got.dtype, got.shape) == (theirs.dtype, theirs.shape)
        if got.numel():
            floor = torch.finfo(got.dtype).eps * want.abs().max()
            assert (got - want).abs().max() <= 2 * (theirs - want).abs().max() + floor
        if one_rounding and got.dtype == torch.bfloat16:
            torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=2e-5)
    return results


def ragged(num_rows, num_groups):
    """Uneven sizes: every third group empty, a tail of an eighth of the rows."""
    owners = [g for g in range(num_groups) if g % 3 != 1]
    rows = num_rows - num_rows // 8
    sizes = [0] * num_groups
    for i, group in enumerate(owners):
        sizes[group] = rows * (i + 1) ** 2 // len(owners) ** 2
        sizes[group] -= rows * i**2 // len(owners) ** 2
    return sizes


def gmm_operands(num_rows, sizes, size_k, size_n, transpose_rhs, dtype):
    """lhs, rhs, group sizes, cotangent; NaN in every row that no group owns."""
    lhs = torch.randn(num_rows, size_k).to(dtype)
    shape = (size_n, size_k) if transpose_rhs else (size_k, size_n)
    rhs = torch.randn(len(sizes), *shape).to(dtype)
    dout = torch.randn(num_rows, size_n).to(dtype)
    lhs[sum(sizes) :] = NAN
    dout[sum(sizes) :] = NAN
    return lhs, rhs, int32(sizes), dout


def compare_gmm(num_rows, sizes, size_k, size_n, transpose_rhs, dtype=torch.float32):
    *operands, dout = gmm_operands(num_rows, sizes, size_k, size_n, transpose_rhs, dtype)

    def product(lhs, rhs, group_sizes):
        return gmm(lhs, rhs, group_sizes, transpose_rhs=transpose_rhs)

    out, dlhs, drhs = compare(product, *operands, douts=[dout])
    assert not out[sum(sizes) :].count_nonzero() and not dlhs[sum(sizes) :].count_nonzero()
    for size, gradient in zip(sizes, drhs, strict=True):
        assert size or not gradient.count_nonzero()


GMM_CASES = [pytest.param(s, torch.float32, id=s.name) for s in TINY + KNOWN_ISSUES]
GMM_CASES += [pytest.param(s, torch.bfloat16, id=f"{s.name}, bf16") for s in TINY[-2:]]


@pytest.mark.parametrize(("shape", "dtype"), GMM_CASES)
def test_gmm(shape, dtype):
    sizes = shape.group_sizes or ragged(shape.num_rows, shape.num_groups)
    compare_gmm(shape.num_rows, sizes, shape.size_k, shape.size_n, shape.transpose_rhs, dtype)


# Three row tiles of 128, the last one ragged. One shape, so that one compilation serves all sizes.
NUM_ROWS, NUM_GROUPS = 300, 6
EDGES = (0, 1, 127, 128, 129, 255, 256, 257, 299, 300)


@st.composite
def group_sizes(draw):
    """Ends of groups drawn with replacement, often beside a tile's edge."""
    end = st.one_of(st.sampled_from(EDGES), st.integers(0, NUM_ROWS))
    ends = sorted(draw(st.lists(end, min_size=NUM_GROUPS, max_size=NUM_GROUPS)))
    return [end - start for start, end in itertools.pairwise([0, *ends])]


@settings(max_examples=15)
@given(group_sizes(), st.booleans())
@example([0, 0, 0, 0, 0, 0], False)
@example([0, 0, 300, 0, 0, 0], True)
@example([0, 128, 0, 128, 0, 44], False)
@example([1, 1, 1, 1, 1, 1], True)
def test_gmm_whatever_the_sizes(sizes, transpose_rhs):
    compare_gmm(NUM_ROWS, sizes, 20, 12, transpose_rhs)


@pytest.mark.parametrize("sizes", [[70, 90, 0, 100], [0, 0, 300, 0]])
def test_gmm_of_a_range_keeps_the_other_rows(sizes):
    lhs, rhs, group_sizes, dout = gmm_operands(NUM_ROWS, sizes, 20, 12, True, torch.float32)
    lhs, dout, kept = lhs.nan_to_num(), dout.nan_to_num(), torch.randn(NUM_ROWS, 12)

    def product(lhs, rhs, kept, group_sizes):
        range_of_groups = {"group_offset": 1, "partial_sum": kept}
        return gmm(lhs, rhs, group_sizes, transpose_rhs=True, **range_of_groups)

    out, *_ = compare(product, lhs, rhs[1:3], kept, group_sizes, douts=[dout])
    other = torch.ones(NUM_ROWS, dtype=bool)
    other[sizes[0] : sum(sizes[:3])] = False
    assert torch.equal(out[other], kept[other])


def test_gmm_casts_master_weights_and_does_not_round_their_gradient():
    lhs, rhs, sizes, dout = gmm_operands(200, [40, 0, 150], 48, 24, True, torch.bfloat16)
    rhs = torch.randn(rhs.shape)

    def product(lhs, rhs, group_sizes):
        return gmm(lhs, rhs, group_sizes, transpose_rhs=True)

    rounded = run(product, lhs, rhs.bfloat16(), sizes, douts=[dout], device="xla")
    out, dlhs, drhs = run(product, lhs, rhs, sizes, douts=[dout], device="xla")
    torch.testing.assert_close([out, dlhs], rounded[:2], rtol=0, atol=0)
    exact = run(product, *wide((lhs, rhs, sizes)), douts=wide([dout]))[2]
    assert drhs.dtype == torch.float32
    torch.testing.assert_close(drhs.double(), exact, rtol=1e-5, atol=1e-5)


TGMM_CASES = [pytest.param(s, torch.float32, id=s.name) for s in TGMM_SHAPES[1:]]
TGMM_CASES += [pytest.param(TGMM_SHAPES[-1], torch.bfloat16, id=f"{TGMM_SHAPES[-1].name}, bf16")]


@pytest.mark.parametrize(("shape", "dtype"), TGMM_CASES)
def test_tgmm(shape, dtype):
    sizes = ragged(shape.num_rows, shape.num_groups)
    lhs = torch.randn(shape.num_rows, shape.size_k).to(dtype)
    rhs = torch.randn(shape.num_rows, shape.size_n).to(dtype)
    lhs[sum(sizes) :] = NAN
    rhs[sum(sizes) :] = NAN
    dout = torch.randn(shape.num_groups, shape.size_k, shape.size_n).to(dtype)
    out, dlhs, drhs = compare(tgmm, lhs, rhs, int32(sizes), douts=[dout])
    for rows in (dlhs, drhs):
        assert not rows[sum(sizes) :].count_nonzero()
    for size, matrix in zip(sizes, out, strict=True):
        assert size or not matrix.count_nonzero()


def test_tgmm_gives_another_dtype_from_its_accumulator():
    lhs, rhs = torch.randn(2, 200, 24).bfloat16()
    sizes = int32([150, 0, 30])
    out = tgmm(lhs.to("xla"), rhs.to("xla"), sizes.to("xla"), out_dtype=torch.float32).cpu()
    assert out.dtype == torch.float32
    exact = tgmm(lhs.double(), rhs.double(), sizes)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def stable_argsort(ids, num_experts):
    flat = ids.flatten().long()
    slots = torch.argsort(flat, stable=True)
    rows = torch.empty_like(slots)
    rows[slots] = torch.arange(slots.numel())
    return [t.int() for t in (flat.bincount(minlength=num_experts), rows.view(ids.shape), slots)]


def assert_sorts(ids, num_experts):
    plan = [t.cpu() for t in routing_plan(ids.to("xla"), num_experts)[:3]]
    torch.testing.assert_close(plan, stable_argsort(ids, num_experts), rtol=0, atol=0)


def expert_ids(shape):
    popularity = torch.arange(1, shape.num_experts + 1) ** -shape.skew
    draws = popularity.expand(shape.num_tokens, -1).multinomial(shape.top_k)
    return draws.int()


@pytest.mark.parametrize("shape", ROUTING_SHAPES, ids=lambda shape: shape.name)
def test_routing_plan_is_a_stable_sort(shape):
    assert_sorts(expert_ids(shape), shape.num_experts)


# 800 slots: three whole blocks of 256 and a part of one; K and E of the 26B model.
ROUTINGS = {
    "uniform": lambda: torch.rand(100, 128).topk(8).indices,
    "few experts": lambda: torch.rand(100, 9).topk(8).indices * 14,
    "one expert": lambda: torch.full((100, 8), 77),
    "first and last": lambda: torch.arange(800).view(100, 8) % 2 * 127,
    "falling": lambda: torch.arange(799, -1, -1).view(100, 8) * 128 // 800,
    "ties inside a token": lambda: torch.randint(0, 3, (100, 8)),
}


@pytest.mark.parametrize("case", ROUTINGS)
def test_routing_plan_on_ties_and_skew_over_several_blocks(case):
    assert_sorts(ROUTINGS[case]().int(), 128)


def dispatch_case(shape, dtype):
    plan = routing_plan(expert_ids(shape), shape.num_experts)
    x = torch.randn(shape.num_tokens, shape.width).to(dtype)
    rows = torch.randn(shape.num_tokens * shape.top_k, shape.width).to(dtype)
    return plan, x, rows


DISPATCH = [ROUTING_SHAPES[i] for i in (0, 2, 3)]
dispatch_shapes = pytest.mark.parametrize("shape", DISPATCH, ids=lambda shape: shape.name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@dispatch_shapes
def test_permute_copies_and_its_gradient_sums(shape, dtype):
    plan, x, drows = dispatch_case(shape, dtype)

    def function(x, *slots):
        return permute(x, plan._replace(row_of_slot=slots[0], slot_of_row=slots[1]))

    out, _ = compare(function, x, *plan[1:3], douts=[drows], one_rounding=True)
    assert torch.equal(out, permute(x, plan))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@dispatch_shapes
def test_unpermute_sums_and_its_gradient_copies(shape, dtype):
    plan, dx, rows = dispatch_case(shape, dtype)

    def function(rows, *slots):
        return OPS.unpermute(rows, list(slots), "")

    _, drows = compare(function, rows, *plan[1:3], douts=[dx], one_rounding=True)
    assert torch.equal(drows, permute(dx, plan))


@pytest.mark.parametrize(
    ("dtype", "weights_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2],
    ids=str,
)
@pytest.mark.parametrize("shape", COMBINE_SHAPES[2:4], ids=lambda shape: shape.name)
def test_combine(shape, dtype, weights_dtype):
    plan, dout, rows = dispatch_case(shape, dtype)
    weights = torch.rand(shape.num_tokens, shape.top_k).to(weights_dtype)

    def function(rows, weights, *slots):
        return combine(rows, weights, plan._replace(row_of_slot=slots[0], slot_of_row=slots[1]))

    compare(function, rows, weights, *plan[1:3], douts=[dout], one_rounding=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_combine_backward(dtype):
    shape = COMBINE_SHAPES[3]
    plan, dout, rows = dispatch_case(shape, dtype)
    weights, dweights = torch.rand(2, shape.num_tokens, shape.top_k)
    drows = torch.randn(rows.shape).to(dtype)

    def function(dout, rows, weights, *slots):
        return OPS.combine_backward(dout, rows, weights, list(slots), "")

    compare(
        function,
        *(dout, rows, weights, *plan[1:3]),
        douts=[drows, dweights],
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 6), (2, 3, 64)])
def test_gelu_gate(shape, dtype):
    h = (3 * torch.randn(shape)).to(dtype)
    dout = torch.randn(*shape[:-1], shape[-1] // 2).to(dtype)
    compare(gelu_gate, h, douts=[dout], one_rounding=True)


def test_no_row():
    x, weight = torch.zeros(0, 5), torch.randn(3, 5, 4)
    sizes = int32([0, 0, 0])
    out, dx, dweight = compare(gmm, x, weight, sizes, douts=[torch.zeros(0, 4)])
    assert out.shape == (0, 4) and dx.shape == (0, 5) and not dweight.count_nonzero()
    plan = routing_plan(torch.zeros(0, 2, dtype=torch.int32, device="xla"), 3)
    assert [tuple(t.shape) for t in plan[:3]] == [(3,), (0, 2), (0,)]
    assert plan.group_sizes.cpu().tolist() == [0, 0, 0]
