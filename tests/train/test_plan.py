"""The plan printed before the first step: every op, every parameter once, nothing cut off."""

import io
import re
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import pytest
from rich.console import Console

import pallas_ops
from train.info import print_info
from train.plan import implementations, print_plan
from train.presets import cpu_tiny, gemma4_26b_a4b
from train.sharding import sharding_table
from train.tables import format_bytes, format_flops


def printed(config, *, width=80):
    console = Console(file=io.StringIO(), width=width)
    print_plan(config, SimpleNamespace(num_row_shards=config.mesh.num_devices), console)
    return console.file.getvalue()


def row_of(text, name):
    """The rest of the one line that begins with `name`."""
    (rest,) = re.findall(rf"^ *{re.escape(name)}  +(\S.*?) *$", text, re.MULTILINE)
    return rest


@pytest.mark.parametrize("target", ["cpu", "tpu"])
def test_every_op_of_the_moe_has_an_implementation_named(target):
    named = {
        op
        for names in implementations(target, "kernel", "kernel", None)
        for op in names.split(", ")
    }
    functions = {name for name in pallas_ops.__all__ if name.islower()}
    # Layouts are no ops of their own; by default weights are whole and gathers not fenced.
    others = {"split_gate_up", "split_experts", "join_experts", "split_gmm", "gather_fence"}
    assert named == functions - others


def test_what_is_in_force():
    text = printed(cpu_tiny())
    assert row_of(text, "devices") == "4 cpu (data 1 x fsdp 4)"
    total = sum(prod(row.shape) for row in sharding_table(cpu_tiny().model, cpu_tiny().mesh))
    assert row_of(text, "parameters").startswith(f"{total:,} in all, ")
    assert row_of(text, "dtypes") == "parameters float32, compute float32, reduce float32"
    assert row_of(text, "layers") == "scan, recompute none"
    assert row_of(text, "expert_mlp, gmm, tgmm") == "Pallas, interpreted as HLO"
    in_force = implementations("cpu", cpu_tiny().attention, *cpu_tiny().dispatch_in_force)
    for op, implementation in in_force.items():
        assert row_of(text, op) == implementation
    assert (
        implementations("tpu", "kernel", "kernel", None)["expert_mlp, gmm, tgmm"]
        == "Pallas, compiled by Mosaic"
    )
    assert row_of(text, "permute, combine") == "JAX, XLA gathers (rows are torch.float32)"
    by_kernel = row_of(printed(gemma4_26b_a4b()), "permute, combine")
    assert by_kernel == "Pallas, interpreted as HLO"  # this process has no TPU
    assert row_of(text, "expert weights") == "whole"
    split = replace(cpu_tiny().model, split_expert_weights=True)
    text = printed(replace(cpu_tiny(), model=split, fence_expert_gathers=True), width=200)
    assert row_of(text, "expert weights") == (
        "in two halves, each gathered on its own, for split_gmm; "
        "gather_fence keeps the router behind their gathers"
    )
    recomputed = printed(replace(cpu_tiny(), layers="loop", recompute="full"))
    assert row_of(recomputed, "layers") == "loop, recompute full"


@pytest.mark.parametrize("preset", [cpu_tiny, gemma4_26b_a4b])
def test_every_rule_in_use_has_one_row_of_80_columns(preset):
    config = preset()
    text = printed(config)
    rows = sharding_table(config.model, config.mesh)
    patterns = {row.pattern for row in rows}
    for pattern in patterns:
        matched = [row for row in rows if row.pattern == pattern]
        found = re.search(rf"^ {re.escape(pattern)} +(\S.*?) +(\d+) +(\S+ \S+) *$", text, re.M)
        split, tensors, size = found.groups()
        assert int(tensors) == len(matched)
        assert size == format_bytes(sum(row.bytes_per_chip for row in matched))
        assert (split == "whole") == (matched[0].spec.count("fsdp") == 0)
    assert re.search(r"^ \*experts\.gate_up +dim -3 over fsdp ", text, re.M)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("preset", [cpu_tiny, gemma4_26b_a4b])
def test_info_has_a_row_for_every_parameter(preset):
    config = preset()
    console = Console(file=io.StringIO(), width=80)
    print_info(config, console=console)
    text = console.file.getvalue()
    rows = sharding_table(config.model, config.mesh)
    for row in rows:
        layout = row_of(text, row.parameter).split("  ")[0]
        assert [int(size) for size in re.findall(r"\d+", layout)] == list(row.shape)
        assert layout.count("(fsdp)") == row.spec.count("fsdp")
    assert len(re.findall(r"^ stack\.|^ embedding\.|^ final_", text, re.MULTILINE)) == len(rows)


def test_flops_have_the_unit_that_suits_them():
    assert format_flops(3.203e9) == "3.203 GFLOP"
    assert format_flops(923.287e12) == "923.3 TFLOP"
    assert format_flops(5e6) == "5 MFLOP"
