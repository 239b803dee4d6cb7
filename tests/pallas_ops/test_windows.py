"""Window tables: what a kernel that follows them reads, whatever the routing."""

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.extra.numpy import arrays

from pallas_ops import OpSharding, routing_plan
from pallas_ops.routing import reference, reference_windows
from pallas_ops.routing.blocks import GRANULE, RING, buffer_rows, check_block
from pallas_ops.routing.limits import why_no_kernel
from pallas_ops.routing.windows import Windows, routing_windows


def rows_by_argsort(ids):
    """Row of every slot, [T, K]."""
    slots = np.argsort(ids.ravel(), kind="stable")
    rows = np.empty_like(slots)
    rows[slots] = np.arange(ids.size)
    return rows.reshape(ids.shape)


def zipf_ids(num_tokens, top_k, num_experts, skew):
    """Distinct experts a token, drawn by a Zipf law."""
    draws = np.random.default_rng(0).gumbel(size=(num_tokens, num_experts))
    draws -= skew * np.log1p(np.arange(num_experts))
    return np.argpartition(draws, -top_k, axis=1)[:, -top_k:].astype(np.int32)


def block_local_ids(num_tokens, top_k, num_experts, block):
    """Every block goes to `top_k` experts of its own."""
    first = np.arange(num_tokens)[:, None] // block * top_k
    return ((first + np.arange(top_k)) % num_experts).astype(np.int32)


# (T, K, E, C, ids): the grid of published tests, then edges.
CASES = {
    "K 8, E 16": (128, zipf_ids(256, 8, 16, 0.0), 16),
    "K 8, E 128": (128, zipf_ids(256, 8, 128, 0.0), 128),
    "three blocks, E 9": (128, zipf_ids(384, 8, 9, 0.0), 9),
    "skewed": (128, zipf_ids(256, 8, 32, 1.0), 32),
    "K 6, two blocks of 256": (256, zipf_ids(512, 6, 12, 0.3), 12),
    "K 2, E 5": (128, zipf_ids(256, 2, 5, 0.0), 5),
    "K 2, E 128": (128, zipf_ids(256, 2, 128, 0.0), 128),
    "K 1, E 4": (64, zipf_ids(640, 1, 4, 0.0), 4),
    "one token": (8, zipf_ids(1, 1, 1, 0.0), 1),
    "one block, not whole": (256, zipf_ids(100, 3, 9, 0.0), 9),
    "last block not whole": (32, zipf_ids(100, 3, 9, 0.5), 9),
    "one expert owns everything": (64, np.full((500, 4), 3, np.int32), 6),
    "first and last expert": (64, np.tile([[0, 127]], (300, 1)).astype(np.int32), 128),
    "each block its own experts": (32, block_local_ids(256, 4, 16, 32), 16),
    "an expert skips blocks": (16, block_local_ids(256, 3, 6, 16), 6),
    "one row a window": (8, np.arange(96, dtype=np.int32).reshape(96, 1) % 12, 12),
    "16,384 tokens": (256, zipf_ids(16_384, 2, 16, 0.5), 16),
}


compiled = jax.jit(routing_windows, static_argnames=("num_experts", "block"))


def tables(ids, num_experts, block):
    made = compiled(ids, num_experts=num_experts, block=block)
    return Windows(*map(np.asarray, made))


def check_tables(windows, ids, num_experts, block):
    """Runs a copying and a reading kernel on row numbers in place of rows."""
    num_tokens, top_k = ids.shape
    rows = rows_by_argsort(ids)
    sizes = np.bincount(ids.ravel(), minlength=num_experts)
    ends = np.cumsum(sizes)
    buffer = buffer_rows(block, top_k, num_experts)
    num_blocks = len(windows.shift)
    assert windows.bounds[0].tolist() == (ends - sizes).tolist()
    assert windows.bounds[-1].tolist() == ends.tolist()
    ring = np.full(RING * buffer, -1)

    def fetch(b):
        start = b % RING * buffer
        ring[start : start + buffer] = -1  # in use by copies from now on
        fetched = 0
        for first, place, count in windows.fetch[b].T:
            assert place == fetched or not count
            lines = np.arange(count * GRANULE)
            assert first * GRANULE + lines.size <= -(-ids.size // GRANULE) * GRANULE
            ring[start + place * GRANULE + lines] = first * GRANULE + lines
            fetched += count
        assert fetched * GRANULE <= buffer

    fetch(0)
    for b in range(num_blocks):
        if b + 1 < num_blocks:
            fetch(b + 1)
        part = slice(b * block, min((b + 1) * block, num_tokens))
        assert (ring[windows.ring[part]] == rows[part]).all()
        place = windows.position[part]
        assert (place - windows.shift[b][ids[part]] == rows[part]).all()
        assert len(np.unique(place)) == place.size and 0 <= place.min() and place.max() < buffer
        lo, hi = windows.bounds[b : b + 2]
        assert (hi - lo == np.bincount(ids[part].ravel(), minlength=num_experts)).all()
        used = hi > lo
        begin = (lo // GRANULE * GRANULE + windows.shift[b])[used]
        end = (-(-hi // GRANULE) * GRANULE + windows.shift[b])[used]
        assert begin.tolist() == [0, *end[:-1]] and end[-1] <= buffer
    assert not windows.position[num_tokens:].any() and not windows.ring[num_tokens:].any()


def reference_tables(ids, num_experts, block):
    made = reference_windows.routing_windows(torch.from_numpy(ids), num_experts, block=block)
    return Windows(*(table.numpy() for table in made))


@pytest.mark.parametrize("case", CASES)
def test_reference_leads_to_every_row_and_back(case):
    block, ids, num_experts = CASES[case]
    own = reference_tables(ids, num_experts, block)
    check_tables(own, ids, num_experts, block)
    found = reference_windows.slots(*map(torch.from_numpy, own[:3]), len(ids))
    _, *expected = reference.routing_plan(torch.from_numpy(ids), num_experts)
    torch.testing.assert_close(list(found), expected, rtol=0, atol=0)


COMPILED = ("three blocks, E 9", "skewed", "one block, not whole", "an expert skips blocks")


@pytest.mark.parametrize("case", [*COMPILED, "one token"])
def test_compiled_tables_are_the_reference(case):
    block, ids, num_experts = CASES[case]
    own = reference_tables(ids, num_experts, block)
    for ours, theirs in zip(own, tables(ids, num_experts, block), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_tables_of_the_most_tokens():
    ids = zipf_ids(65_536, 8, 128, 0.3)
    check_tables(tables(ids, 128, 256), ids, 128, 256)


@st.composite
def tied_ids(draw):
    """Few of 12 experts or many, any ties, also inside one token."""
    used = draw(st.integers(1, 12))
    return draw(arrays("int32", (40, 3), elements=st.integers(0, used - 1)))


@given(tied_ids())
def test_tables_of_any_routing(ids):
    own = reference_tables(ids, 12, 16)
    check_tables(own, ids, 12, 16)
    for ours, theirs in zip(own, tables(ids, 12, 16), strict=True):  # one compilation
        np.testing.assert_array_equal(ours, theirs)


def test_granules_are_fetched_about_once():
    ids = zipf_ids(4096, 8, 128, 0.0)
    fetched = GRANULE * reference_tables(ids, 128, 256).fetch[:, 2].sum()
    # Each of 128 experts may share its first and last granule with a neighbour.
    assert ids.size <= fetched <= ids.size + 2 * 128 * GRANULE
    alone = GRANULE * reference_tables(ids[:256], 128, 256).fetch[:, 2].sum()
    assert alone > 1.3 * 256 * 8  # what blocks would cost that share nothing


def test_shards_have_tables_of_their_own():
    ids = torch.from_numpy(zipf_ids(200, 3, 7, 0.5))
    whole = reference_windows.routing_windows(ids, 7, num_shards=4, block=16)
    parts = [reference_windows.routing_windows(part, 7, block=16) for part in ids.chunk(4)]
    for table, own in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(table, torch.cat(own))
    rows, slots = reference_windows.slots(*whole[:3], 200, num_shards=4)
    _, *expected = reference.routing_plan(ids, 7, num_shards=4)
    torch.testing.assert_close([rows, slots], expected, rtol=0, atol=0)


def test_plan_for_kernels_keeps_the_permutation():
    ids = torch.from_numpy(zipf_ids(100, 3, 9, 0.0))
    plan, other = routing_plan(ids, 9, implementation="kernel", block=32), routing_plan(ids, 9)
    torch.testing.assert_close(plan[:3], other[:3], rtol=0, atol=0)
    assert other.windows is None and plan.windows.block == 32


BAD_BLOCKS = {
    "zero": (0, 8, 128, "block is 0; it must be a positive multiple of 8"),
    "no granule": (100, 8, 128, "block is 100; it must be a positive multiple of 8"),
    "large": (2048, 8, 128, "block is 2048: 3 buffers .* have 54536 rows, more than 32768; choose"),
}


@pytest.mark.parametrize("case", BAD_BLOCKS)
def test_bad_block(case):
    *arguments, message = BAD_BLOCKS[case]
    with pytest.raises(ValueError, match=message):
        check_block(*arguments)


def test_what_the_kernels_take():
    assert why_no_kernel(2816, torch.bfloat16, 8, 128) is None
    assert "rows are torch.float32; convert" in why_no_kernel(2816, torch.float32, 8, 128)
    assert "width 100; pad it to a multiple of 128" in why_no_kernel(100, torch.bfloat16, 8, 128)
    assert "width 0; pad" in why_no_kernel(0, torch.bfloat16, 8, 128)
    too_large = why_no_kernel(2816, torch.bfloat16, 8, 128, block=1024)
    assert "29952 rows of width 2816" in too_large and "plan smaller blocks" in too_large


@pytest.mark.parametrize("block", [8, 32])
@pytest.mark.parametrize("num_shards", [None, 4])
def test_the_plan_takes_its_group_sizes_from_the_tables(block, num_shards):
    ids = torch.from_numpy(zipf_ids(400, 3, 9, 0.5))
    sharding = num_shards and OpSharding(mesh=(("fsdp", num_shards),), row_axes=("fsdp",))
    counted = routing_plan(ids, 9, sharding=sharding).group_sizes
    options = {"implementation": "kernel", "block": block, "sharding": sharding}
    assert torch.equal(routing_plan(ids, 9, **options).group_sizes, counted)
    shards = ids.reshape(num_shards or 1, -1)
    expected = [torch.bincount(shard, minlength=9).tolist() for shard in shards]
    assert counted.reshape(-1, 9).tolist() == expected
