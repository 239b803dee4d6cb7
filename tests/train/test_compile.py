"""`python -m train compile`: the program reader on small programs, and the whole command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.compile import hlo
from train.compile.command import on_topology
from train.compile.compiler import Program
from train.compile.report import CLOCK_HZ, MODEL_BYTES_PER_S, make_report
from train.compile.topology import TOPOLOGIES, find_topology
from train.launch import prepare_tracing
from train.presets import cpu_tiny

LOOP = """HloModule step, is_scheduled=true

%fused_dot (p0: bf16[8,16], p1: bf16[16,4]) -> bf16[8,4] {
  %p0 = bf16[8,16]{1,0} parameter(0)
  %p1 = bf16[16,4]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,4]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %state = (s32[], bf16[8,16]{1,0}) parameter(0)
  %x = bf16[8,16]{1,0} get-tuple-element(%state), index=1
  %w = bf16[16,4]{1,0} constant({...})
  %gathered = bf16[32,16]{1,0} all-gather(%x), dimensions={0}
  %y = bf16[8,4]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused_dot, c={"estimated_cycles":"175"}
  %moved = bf16[16,8]{1,0} transpose(%x), dimensions={1,0}
  ROOT %next = (s32[], bf16[8,16]{1,0}) tuple(%state, %x)
}

%condition (state.1: (s32[], bf16[8,16])) -> pred[] {
  %state.1 = (s32[], bf16[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state.1), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (a: bf16[8,16]) -> bf16[8,16] {
  %a = bf16[8,16]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[8,16]{1,0}) tuple(%zero, %a)
  %loop = (s32[], bf16[8,16]{1,0}) while(%start), condition=%condition, body=%body
  %sorted = bf16[8,16]{1,0} sort(%a), dimensions={0}
  ROOT %out = bf16[8,16]{1,0} get-tuple-element(%loop), index=1
}
"""


def program(text, **sizes):
    names = ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "code_bytes")
    return Program(hlo=text, compile_s=1.0, **dict.fromkeys(names, 0) | sizes)


def report_of(text, **sizes):
    topology = TOPOLOGIES["v6e-8"]
    return make_report("small", topology.name, program(text, **sizes), topology.chip)


def test_a_loop_body_counts_as_often_as_it_turns():
    counts = {e.instruction.name: e.count for e in hlo.Program(LOOP).executed()}
    assert counts["gathered"] == counts["y"] == 5
    assert counts["sorted"] == counts["loop"] == 1
    assert "dot.1" not in counts


def test_a_trip_count_the_compiler_states_wins():
    stated = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert {e.count for e in hlo.Program(stated).executed()} == {1, 7}


def test_an_unknown_trip_count_is_said():
    unknown = LOOP.replace("%bound = s32[] constant(5)", "%bound = s32[] negate(%i)")
    report = report_of(unknown)
    assert "trip count of loop, counted once" in report.unknowns


def test_collectives_formatting_products_and_unknowns_are_told_apart():
    report = report_of(LOOP)
    (gather,) = report.collectives
    assert (gather.kind, gather.count, gather.bytes) == ("all-gather", 5, 5 * 32 * 16 * 2)
    kinds = {kind.kind: kind for kind in report.time_by_kind}
    assert kinds["matrix products"].modelled_s == pytest.approx(5 * 175 / CLOCK_HZ)
    moved = 5 * 2 * 8 * 16 * 2
    assert kinds["data formatting"].bytes == moved
    assert kinds["data formatting"].modelled_s == pytest.approx(moved / MODEL_BYTES_PER_S)
    assert kinds["sort"].modelled_s is None
    assert "sort: 1 executed" in report.unknowns
    modelled = (kinds["matrix products"].modelled_s, kinds["data formatting"].modelled_s)
    assert report.modelled_step_s == pytest.approx(sum(modelled))


def test_tpus_own_reduce_scatter_is_recognised():
    text = LOOP.replace("calls=%fused_dot", "calls=%all-reduce-scatter.1")
    text = text.replace("%fused_dot (", "%all-reduce-scatter.1 (")
    kinds = {use.kind: use.count for use in report_of(text).collectives}
    assert kinds == {"all-gather": 5, "reduce-scatter": 5}


def test_memory_counts_a_shared_buffer_once_and_says_whether_it_fits():
    sizes = {"argument_bytes": 10, "output_bytes": 9, "alias_bytes": 8, "temp_bytes": 5}
    assert report_of(LOOP, **sizes).memory["peak"] == 16
    assert report_of(LOOP, **sizes).fits
    assert not report_of(LOOP, temp_bytes=2**40).fits


def test_bytes_of_shapes():
    assert hlo.shape_bytes("(bf16[2,3]{1,0}, /*index=1*/f32[], pred[7]{0})") == 12 + 4 + 7


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.Program("hello")


def test_topologies_by_name():
    assert find_topology("v6e-128").libtpu_name == "v6e:8x16"
    assert {t.num_chips for t in TOPOLOGIES.values()} == {1, 4, 8, 16, 32, 64, 128, 256}
    with pytest.raises(ValueError, match=r"topology = 'v7-8': unknown; use one of v6e-1, v6e-4"):
        find_topology("v7-8")


def test_the_mesh_follows_the_topology():
    config = on_topology(cpu_tiny(), find_topology("v6e-16"))
    assert (config.mesh.platform, config.mesh.fsdp) == ("tpu", 16)


def test_tracing_must_come_first(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", sys)
    with pytest.raises(RuntimeError, match="jax imported before the environment was prepared"):
        prepare_tracing({})


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_tiny_step_compiles_for_eight_chips(tmp_path):
    environment = dict(os.environ)
    for variable in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS"):
        environment.pop(variable, None)
    options = "--preset cpu_tiny --topology v6e-8 --precision.compute bfloat16 --recompute"
    done = subprocess.run(
        [sys.executable, "-m", "train", "compile", *options.split(), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "cpu_tiny-v6e-8" / "report.json").read_text())
    assert report["fits"]
    # All state is donated: only the batch comes in without leaving, and only metrics leave.
    assert report["memory"]["argument"] - report["memory"]["alias"] < 64_000
    kinds = {kind["kind"]: kind["count"] for kind in report["time_by_kind"]}
    # Two products a layer: forward, recomputed, and the gradient of their rows. The global layer's
    # loop has one turn (the preset has one period), which the compiler unrolls; it then sees both
    # runs of that layer in one place and merges them.
    assert kinds["kernel gmm"] == 5 * 2 * 3 + 1 * 2 * 2
    assert kinds["kernel tgmm"] == 6 * 2
    # Rows go to experts and back in kernels; gmm's metadata is gathered, the embedding scattered.
    assert kinds["kernel permute_windows"] == kinds["kernel combine_windows"] == 5 * 2 + 1
    assert kinds["kernel unpermute_windows"] == kinds["kernel combine_backward_windows"] == 6
    assert "sort" not in kinds and kinds["scatter"] == 1
    assert not any("trip count" in unknown for unknown in report["unknowns"])
