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
    named = {op for names in implementations(target) for op in names.split(", ")}
    functions = {name for name in pallas_ops.__all__ if name.islower()}
    assert named - {"attention"} == functions - {"split_gate_up"}  # a split is no op of its own


def test_what_is_in_force():
    text = printed(cpu_tiny())
    assert row_of(text, "devices") == "4 cpu (data 1 x fsdp 4)"
    total = sum(prod(row.shape) for row in sharding_table(cpu_tiny().model, cpu_tiny().mesh))
    assert row_of(text, "parameters").startswith(f"{total:,} in all, ")
    assert row_of(text, "dtypes") == "parameters float32, compute float32, reduce float32"
    assert row_of(text, "layers") == "scan, activations kept"
    assert row_of(text, "gmm, tgmm") == "Pallas, interpreted as HLO"
    for op, implementation in implementations("cpu").items():
        assert row_of(text, op) == implementation
    assert implementations("tpu")["gmm, tgmm"] == "Pallas, compiled by Mosaic"
    recomputed = printed(replace(cpu_tiny(), layers="loop", recompute=True))
    assert row_of(recomputed, "layers") == "loop, recomputed"


@pytest.mark.parametrize("preset", [cpu_tiny, gemma4_26b_a4b])
def test_every_parameter_has_one_whole_row_of_80_columns(preset):
    config = preset()
    text = printed(config)
    rows = sharding_table(config.model, config.mesh)
    for row in rows:
        layout = row_of(text, row.parameter).split("  ")[0]
        assert [int(size) for size in re.findall(r"\d+", layout)] == list(row.shape)
        assert layout.count("(fsdp)") == row.spec.count("fsdp")
    assert len(re.findall("^ stack|^ embedding|^ final", text, re.MULTILINE)) == len(rows)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_info_shows_the_same_table():
    console = Console(file=io.StringIO(), width=80)
    print_info(gemma4_26b_a4b(), console=console)
    start = "Parameters on the mesh"
    tables = [
        t[t.index(start) :].rstrip() for t in (console.file.getvalue(), printed(gemma4_26b_a4b()))
    ]
    assert tables[0] == tables[1]
    assert row_of(tables[0], "embedding.weight") == "262144(fsdp)x2816  23.07 MB"
    assert row_of(tables[0], "total") == "791.3 MB"
