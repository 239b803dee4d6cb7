"""What PyTorch asks of a custom op, for every op: schema, fakes, autograd, AOT dispatch."""

import json

import pytest
import torch
from torch.library import opcheck
from torch.utils import _pytree as pytree

from pallas_ops import OpSharding, combine, gmm, permute, routing_plan, tgmm

OPS = torch.ops.pallas_ops
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
TWO = OpSharding(mesh=(("fsdp", 2),), row_axes=("fsdp",))
LAYOUTS = pytest.mark.parametrize("sharding", [None, TWO], ids=["one device", "two shards"])


def sample(dtype, sharding, requires_grad=True):
    """Arguments of each op: 4 tokens to 2 of 3 experts, one of them empty, D = 5, 2F = 4; attention
    of 2 sequences of 4 tokens with 2 query heads on 1 key head of 3; norm_rope of 3 heads of 6."""

    def floats(*shape, dtype=dtype):
        return torch.randn(shape, dtype=dtype, requires_grad=requires_grad)

    ids = torch.tensor([[0, 2], [2, 0], [2, 0], [0, 2]], dtype=torch.int32)
    text = "" if sharding is None else sharding.to_json()
    sizes, *slots, _ = routing_plan(ids, 3, sharding=sharding)
    windows = OPS.routing_windows(ids, 3, 8, text)
    four, *_ = routing_plan(ids, 4, sharding=sharding)
    wide, reduce = torch.promote_types(dtype, torch.float32), torch.float32
    tables = tuple(torch.randn(4, 1, 3, dtype=wide) for _ in ("cos", "sin"))
    return {
        "gmm": (floats(8, 5), floats(3, 5, 4), sizes, False, reduce, text),
        "gmm transposed": (floats(8, 5), floats(3, 4, 5, dtype=wide), sizes, True, reduce, text),
        "gmm of a range": (
            *(floats(8, 5), floats(2, 5, 4), sizes, False, reduce, text),
            *(1, floats(8, 4)),
        ),
        "expert_mlp": (
            *(floats(8, 5), floats(3, 4, 5), floats(3, 2, 5), sizes, True, reduce, text),
        ),
        "expert_mlp alone": (
            *(floats(8, 5), floats(3, 4, 5), floats(3, 2, 5), sizes, False, reduce, text),
        ),
        # Without a gradient of its own: expert_mlp's gradients of gradients go another way.
        "expert_mlp_gate_gradient": (
            torch.randn(8, 5, dtype=dtype),
            torch.randn(3, 2, 5, dtype=dtype),
            torch.randn(8, 4, dtype=dtype),
            sizes,
            text,
        ),
        "split_gmm": (floats(8, 6), floats(2, 4, 3, 5), four, False, reduce, text),
        "split_gmm transposed": (
            *(floats(8, 5), floats(2, 4, 3, 5, dtype=wide), four, True, reduce, text),
        ),
        "split_tgmm": (floats(8, 6), floats(8, 5), four, dtype, reduce, text),
        "gather_fence": (
            *(floats(4, 5), [torch.randn(4, 3, 5), torch.randn(2, 4, 3, 5)], dtype, text),
        ),
        "tgmm": (floats(8, 5), floats(8, 4), sizes, dtype, reduce, text),
        "tgmm wide": (floats(8, 5), floats(8, 4), sizes, wide, reduce, text),
        "tgmm of two groups": (floats(8, 5), floats(8, 4), sizes, dtype, reduce, text, 1, 2),
        "routing_plan": (ids, 3, text),
        "routing_windows": (ids, 3, 8, text),
        **{
            f"{name}{form}": (*operands, plan, text)
            for form, plan in {"": slots, " by windows": list(windows)}.items()
            for name, operands in {
                "permute": (floats(4, 5),),
                "unpermute": (floats(8, 5),),
                "combine": (floats(8, 5), floats(4, 2, dtype=wide)),
                "combine_backward": (floats(4, 5), floats(8, 5), floats(4, 2, dtype=wide)),
            }.items()
        },
        "attention": (floats(2, 4, 2, 3), *(floats(2, 4, 1, 3) for _ in "kv"), None, 2, text),
        # Differentiable once: its own operands carry no gradient.
        "attention_backward": (
            torch.randn(2, 4, 2, 3, dtype=dtype),
            *(torch.randn(2, 4, 1, 3, dtype=dtype) for _ in "kv"),
            torch.randn(2, 4, 2, 3, dtype=dtype),
            torch.randn(2, 2, 4, dtype=wide),
            torch.randn(2, 4, 2, 3, dtype=dtype),
            None,
            2,
            text,
        ),
        "norm_rope": (floats(2, 4, 3, 6), floats(6), *tables, 1e-6, text),
        "norm_rope alone": (floats(2, 4, 3, 6), None, None, None, 1e-6, text),
        "norm_rope_backward": (
            *(torch.randn(2, 4, 3, 6, dtype=dtype) for _ in range(2)),
            torch.randn(6, dtype=dtype),
            *tables,
            1e-6,
            text,
        ),
    }


NAMES = list(sample(torch.float32, None))


def call_of(name):
    return getattr(OPS, name.split()[0]).default


@LAYOUTS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, dtype, sharding):
    opcheck(call_of(name), sample(dtype, sharding)[name])


def test_no_op_is_forgotten():
    names = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    registered = {op for namespace, op in names if namespace == "pallas_ops"}
    assert registered == {name.split()[0] for name in NAMES}


@LAYOUTS
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_fresh_and_repeatable(name, sharding):
    args = sample(torch.bfloat16, sharding, requires_grad=False)[name]
    first, second = call_of(name)(*args), call_of(name)(*args)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    outputs = first if isinstance(first, tuple) else (first,)
    tensors = [t for t in pytree.tree_leaves((args, outputs)) if torch.is_tensor(t) and t.numel()]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


def test_no_token_no_row():
    plan = routing_plan(torch.zeros(0, 2, dtype=torch.int32), 3)
    assert plan.group_sizes.tolist() == [0, 0, 0]
    x = torch.zeros(0, 5, requires_grad=True)
    weight = torch.zeros(3, 5, 4, requires_grad=True)
    out = combine(gmm(permute(x, plan), weight, plan.group_sizes), torch.zeros(0, 2), plan)
    assert out.shape == (0, 4)
    out.sum().backward()
    assert not weight.grad.count_nonzero() and weight.grad.shape == weight.shape
    assert tgmm(x.detach(), x.detach(), plan.group_sizes).shape == (3, 5, 5)


def test_sharding_travels_as_json():
    layout = OpSharding((("data", 2), ("fsdp", 4)), ("data", "fsdp"), weight_dim=None)
    assert OpSharding.from_json(layout.to_json()) == layout
    assert json.loads(layout.to_json())["weight_axis"] == "fsdp"
    assert layout.to_json() == OpSharding.from_json(layout.to_json()).to_json()
    assert (layout.num_row_shards, layout.num_weight_shards) == (8, 1)
    assert TWO.num_weight_shards == 2


BAD_LAYOUTS = {
    "axis twice": (((("a", 1), ("a", 2)), ("a",), "a"), "give every axis its own name"),
    "size": (((("a", 0),), ("a",), "a"), "mesh axis 'a' has size 0; sizes must be at least 1"),
    "row axis twice": (((("a", 2),), ("a", "a"), "a"), "name every axis once"),
    "row axis": (((("a", 2),), ("b",), "a"), r"row_axes names axis 'b'; the mesh has only \['a'\]"),
    "weight axis": (((("a", 2),), ("a",)), "weight_axis names axis 'fsdp'; the mesh has only"),
    "weight dim": (((("a", 2),), ("a",), "a", 3), "weight_dim is 3; use 0, 1, 2 or None"),
    "weight axis apart": (((("a", 2), ("b", 2)), ("a",), "b"), "weight_axis 'b' is none of row_ax"),
}


@pytest.mark.parametrize("case", BAD_LAYOUTS)
def test_bad_sharding(case):
    fields, message = BAD_LAYOUTS[case]
    with pytest.raises(ValueError, match=message):
        OpSharding(*fields)
