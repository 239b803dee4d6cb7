"""Several slices: weights are gathered within one, gradients are summed between them once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_ops.chips import V6E
from train.compile import hlo
from train.compile.collectives import begins, ends
from train.compile.compiler import Program
from train.compile.report import make_report
from train.config import MeshConfig
from train.mesh import refuse_weights_between_slices

# The mesh of a run


@pytest.mark.parametrize(
    ("data", "fsdp", "slices"),
    [(1, 4, [0] * 4), (2, 2, [0, 0, 1, 1]), (2, 4, [0] * 8), (4, 2, [0] * 4 + [1] * 4)],
)
def test_an_fsdp_axis_within_a_slice_is_taken(data, fsdp, slices):
    refuse_weights_between_slices(MeshConfig(data=data, fsdp=fsdp), slices)


@pytest.mark.parametrize(
    ("data", "fsdp", "slices"),
    [(1, 4, [0, 0, 1, 1]), (2, 2, [0, 1, 0, 1])],
    ids=["one axis over both", "slices not one after the other"],
)
def test_weights_gathered_between_slices_are_refused(data, fsdp, slices):
    with pytest.raises(
        ValueError, match=r"between the 2 slices, .*; give --mesh.data 2 --mesh.fsdp 2"
    ):
        refuse_weights_between_slices(MeshConfig(data=data, fsdp=fsdp), slices)


# The report

TRANSFER = """channel_id=6, is_host_transfer=true, frontend_attributes={\
_xla_host_transfer_handler_name="xla_megascale_runtime",\
_xla_host_transfer_rendezvous="all-reduce.30_6",_xla_megascale_reduce_operation="SUM",\
_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}"""
BETWEEN = f"""HloModule step, is_scheduled=true

ENTRY %main (a: f32[8,128]) -> f32[8,128] {{
  %a = f32[8,128]{{1,0}} parameter(0)
  %token = token[] after-all()
  %send = (f32[8,128]{{1,0}}, u32[], token[]) send(%a, %token), {TRANSFER}
  %recv = (f32[8,128]{{1,0}}, u32[], token[]) recv(%token), {TRANSFER}
  %host = (f32[8,128]{{1,0}}, u32[], token[]) send(%a, %token), channel_id=7, is_host_transfer=true
  %send-done = token[] send-done(%send), channel_id=6, is_host_transfer=true
  %recv-done = (f32[8,128]{{1,0}}, token[]) recv-done(%recv), channel_id=6, is_host_transfer=true
  ROOT %sum = f32[8,128]{{1,0}} get-tuple-element(%recv-done), index=0
}}
"""
"""As libtpu 0.0.21 writes a sum over two slices, shortened, and a send to someone else."""


def test_a_sum_between_slices_is_told_apart():
    program = hlo.Program(BETWEEN)
    executed = {one.instruction.name: one for one in program.executed()}
    sent = begins(program, executed["send"])
    assert (sent.kind, sent.bytes, sent.group_size) == ("all-reduce", 4096, 2)
    assert sent.is_between_slices and sent.is_asynchronous
    assert begins(program, executed["recv"]) is None and begins(program, executed["host"]) is None
    assert ends(program, executed["recv-done"]) is None
    sizes = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "code_bytes")
    compiled = Program(hlo=BETWEEN, compile_s=1.0, **dict.fromkeys(sizes, 0))
    report = make_report("small", "2xv6e-4", compiled, V6E)
    (use,) = report.collectives
    assert (use.kind, use.count, use.bytes) == ("all-reduce between slices", 1, 4096)
    assert use.link_s is None and report.exposed_collectives_s == 0
    assert any(unknown.startswith("all-reduce between slices: 1") for unknown in report.unknowns)


# A step for slices that are not here

SMALL = (
    "--preset cpu_tiny --topology 2xv6e-4 --recompute full --model.num_hidden_layers 1 "
    "--model.layer_types full_attention --model.num_experts 4 --data.batch_size 8"
).split()


@pytest.mark.exhaustive
@pytest.mark.libtpu
def test_a_step_on_two_slices_sums_gradients_between_them_and_gathers_within(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "train", "compile", *SMALL, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "cpu_tiny-2xv6e-4"
    report = json.loads((folder / "report.json").read_text())
    assert report["config"]["mesh"] == {"platform": "tpu", "fsdp": 4, "data": 2}
    uses = {use["kind"]: use for use in report["collectives"]}
    between = {kind for kind in uses if kind.endswith("between slices")}
    assert between == {"all-reduce between slices"}
    assert "all-gather" in uses
    # What is summed between slices is a chip's share of every gradient, once, and scalars: in fp32
    # the experts' and whatever no product makes, in the compute dtype, fp32 here, the others.
    info = subprocess.run(
        [sys.executable, "-m", "train", "info", "--json", "--mesh.fsdp", "4", *SMALL[4:]],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    share = sum(row["bytes_per_chip"] for row in json.loads(info.stdout)["sharding"])
    assert share <= uses["all-reduce between slices"]["bytes"] <= 1.1 * share
    program = hlo.Program((folder / "program.hlo").read_text())
    groups = [
        found.group_size
        for executed in program.executed()
        if (found := begins(program, executed)) and not found.is_between_slices
    ]
    assert groups and max(groups) == 4
