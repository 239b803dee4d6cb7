"""`python -m train compile`: the program reader on small programs, and the whole command."""

import json
import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from tests.train.processes import run_module
from train.compile import hlo
from train.compile.collectives import begins
from train.compile.command import compile_and_report, on_topology
from train.compile.compiler import DoesNotFit, Program
from train.compile.model_time import LINK_BYTES_PER_S, MODEL_BYTES_PER_S
from train.compile.report import Workload, make_report
from train.compile.static.own_copies import OWN_COPIES
from train.compile.static.step_time import CLOCK_HZ
from train.compile.topology import TOPOLOGIES, find_topology, next_larger
from train.config import MeshConfig
from train.launch import prepare_tracing
from train.presets import cpu_tiny
from train.xla_flags import FLAGS

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
  %gathered = bf16[32,16]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}
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


def report_of(text, workload=None, **sizes):
    topology = TOPOLOGIES["v6e-8"]
    compiled = program(text, **sizes)
    return make_report("small", topology.name, compiled, topology.chip, workload=workload)


def test_a_loop_body_counts_as_often_as_it_turns():
    counts = {e.instruction.name: e.count for e in hlo.Program(LOOP).executed()}
    assert counts["gathered"] == counts["y"] == 5
    assert counts["sorted"] == counts["loop"] == 1
    assert "dot.1" not in counts


def test_a_trip_count_the_compiler_states_wins():
    stated = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert {e.count for e in hlo.Program(stated).executed()} == {1, 7}


def test_a_loop_whose_first_turn_was_peeled_off_turns_once_less():
    peeled = LOOP.replace("%zero = s32[] constant(0)", "%one = s32[] constant(1)")
    peeled = peeled.replace("tuple(%zero, %a)", "tuple(%begin, %a)")
    peeled = peeled.replace("  %start =", "  %begin = s32[] copy(%one)\n  %start =")
    assert {e.count for e in hlo.Program(peeled).executed()} == {1, 4}


@pytest.mark.parametrize(
    ("known", "unknown"),
    [
        ("%bound = s32[] constant(5)", "%bound = s32[] negate(%i)"),
        ("%zero = s32[] constant(0)", "%zero = s32[] negate(%n)"),
    ],
)
def test_an_unknown_trip_count_is_said(known, unknown):
    report = report_of(LOOP.replace(known, unknown))
    assert "trip count of loop, counted once" in report.unknowns


def test_collectives_formatting_products_and_unknowns_are_told_apart():
    report = report_of(LOOP)
    (gather,) = report.collectives
    size = 32 * 16 * 2
    assert (gather.kind, gather.count, gather.bytes) == ("all-gather", 5, 5 * size)
    # A quarter of what is gathered is this chip's own; the loop waits for each at once.
    link_s = 5 * size * 3 / 4 / LINK_BYTES_PER_S
    assert gather.link_s == pytest.approx(link_s) == pytest.approx(report.exposed_collectives_s)
    kinds = {kind.kind: kind for kind in report.time_by_kind}
    assert kinds["dense matmuls"].modelled_s == pytest.approx(5 * 175 / CLOCK_HZ)
    assert kinds["dense matmuls"].compiler_s == kinds["dense matmuls"].modelled_s
    moved = 5 * 2 * 8 * 16 * 2
    assert kinds["copies and formatting"].bytes == moved
    assert kinds["copies and formatting"].modelled_s == pytest.approx(moved / MODEL_BYTES_PER_S)
    sorted_bytes = 2 * 8 * 16 * 2
    assert kinds["other"].bytes == sorted_bytes
    assert any(unknown.startswith("sort: 1 executed") for unknown in report.unknowns)
    total = 5 * 175 / CLOCK_HZ + (moved + sorted_bytes) / MODEL_BYTES_PER_S
    assert report.modelled_step_s == pytest.approx(total)


def test_rates_follow_from_the_modelled_step():
    report = report_of(LOOP, workload=Workload(tokens=1000, flops=10**6))
    step = report.modelled_step_s
    assert report.modelled_tokens_per_s == pytest.approx(1000 / step)
    assert report.modelled_mfu == pytest.approx(
        1e6 / step / TOPOLOGIES["v6e-8"].chip.peak_bf16_flops
    )
    assert report_of(LOOP).modelled_mfu is None


KERNEL = """HloModule step

ENTRY %main (a: bf16[8,16]) -> bf16[8,16] {
  %a = bf16[8,16]{1,0} parameter(0)
  ROOT %k = bf16[8,16]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", \
metadata={op_name="pallas_ops.gmm.op.3/jit(gmm)/pallas_call"}, c={"flops":"918000000"}
}
"""


def test_a_kernel_without_a_schedule_is_a_bound_and_is_said():
    report = report_of(KERNEL.replace("\\\n", ""))
    (kernel,) = report.kernels
    assert kernel.source == "bound by bytes and FLOPs (no schedule was made)"
    assert kernel.bundles is None
    assert report.modelled_step_s == kernel.modelled_s == pytest.approx(1e-6)
    assert [kind.kind for kind in report.time_by_kind] == ["routed experts"]
    assert f"kernel k, 1 executed: {kernel.source}" in report.unknowns


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
    assert find_topology("v5p-8").libtpu_name == "v5p:2x2x2"
    assert find_topology("v5e-8").chip.hbm_bytes < find_topology("v6e-8").chip.hbm_bytes
    assert {t.num_chips for t in TOPOLOGIES.values()} == {1, 4, 8, 16, 32, 64, 128, 256}
    with pytest.raises(ValueError, match=r"topology = 'v7-8': unknown; use one of v6e-1, v6e-4"):
        find_topology("v7-8")


def test_several_slices_by_name():
    two = find_topology("2xv6e-128")
    assert (two.name, two.num_slices, two.num_chips) == ("2xv6e-128", 2, 256)
    assert (two.libtpu_name, two.grid) == ("v6e:8x16", (8, 16))
    assert find_topology("1xv6e-8") == find_topology("v6e-8")
    larger = next_larger(find_topology("2xv6e-8"))
    assert (larger.name, larger.num_chips) == ("2xv6e-16", 32)
    for name in ("0xv6e-8", "2xv7-8", "2x2xv6e-8"):
        with pytest.raises(ValueError, match=f"topology = '{name}': unknown; .* as in 2xv6e-128"):
            find_topology(name)


def test_the_mesh_follows_the_topology():
    def mesh(name, data=1):
        mesh = MeshConfig(data=data)
        config = replace(cpu_tiny(), mesh=mesh, data=replace(cpu_tiny().data, batch_size=192))
        config = on_topology(config, find_topology(name))
        assert config.mesh.platform == "tpu"
        return config.mesh.data, config.mesh.fsdp

    assert mesh("v6e-16") == (1, 16)
    assert mesh("v6e-16", data=2) == (2, 8)
    assert mesh("2xv6e-16") == mesh("2xv6e-16", data=2) == (2, 16)
    assert mesh("2xv6e-16", data=4) == (4, 8)
    with pytest.raises(ValueError, match=r"mesh.data = 3: no multiple of the 2 slices .* within"):
        mesh("2xv6e-16", data=3)


def test_tracing_must_come_first(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", sys)
    with pytest.raises(RuntimeError, match="jax imported before the environment was prepared"):
        prepare_tracing({})


REFUSAL = "Ran out of memory in memory space hbm. Used 40.00G of 31.25G hbm. Exceeded by 8.75G."


@pytest.mark.parametrize(
    ("words", "told", "files"),
    [
        (REFUSAL, "v6e-8, by 9.40 GB a chip", {"report.json", "report.md", "memory.png"}),
        ("RESOURCE_EXHAUSTED: vmem", "v6e-8: RESOURCE_EXHAUSTED: vmem", set()),
    ],
)
def test_a_step_that_does_not_fit(tmp_path, monkeypatch, words, told, files):
    def refuse(step, topology):
        raise DoesNotFit(words)

    trace = ModuleType("train.compile.trace")
    trace.trace_step = lambda config: SimpleNamespace(argument_names={})
    monkeypatch.setitem(sys.modules, "train.compile.trace", trace)
    monkeypatch.setattr("train.compile.compiler.compile_step", refuse)
    for name in ("prepare_compiler", "prepare_tracing"):
        monkeypatch.setattr(f"train.compile.command.{name}", lambda *chip: None)
    with pytest.raises(SystemExit, match=f"does not fit {told}"):
        compile_and_report(cpu_tiny(), "v6e-8", str(tmp_path))
    folder = tmp_path / "cpu_tiny-v6e-8"
    assert (folder / "does_not_fit.txt").read_text() == words
    assert {path.name for path in folder.iterdir()} == files | {"does_not_fit.txt"}
    if files:
        report = json.loads((folder / "report.json").read_text())
        assert not report["fits"] and len(report["remedies"]) == 3
        assert report["versions"]["libtpu"] and report["config"]["name"] == "cpu_tiny"


@pytest.mark.slow
@pytest.mark.libtpu
def test_a_tiny_step_compiles_for_eight_chips(tmp_path):
    # Two blocks of tokens a chip: the schedule of a kernel with one step has no loop to read.
    options = "--preset cpu_tiny --topology v6e-8 --precision.compute bfloat16 --recompute full"
    options += " --data.batch_size 32"
    run_module("train", "compile", *options.split(), "--out", tmp_path)
    folder = tmp_path / "cpu_tiny-v6e-8"
    report = json.loads((folder / "report.json").read_text())
    assert report["fits"]
    assert "![time by kind](time_by_kind.png)" in (folder / "report.md").read_text()
    assert {path.name for path in folder.iterdir()} == {
        *("report.json", "report.md", "program.hlo", "memory.png", "time_by_kind.png")
    }
    flags = {flag["name"]: flag["value"] for flag in report["flags"]}
    assert flags.items() >= {f.name: f.value for f in FLAGS if f.changes_program}.items()
    named = [(buffer["name"], buffer["shape"]) for buffer in report["largest_buffers"]]
    assert ("exp_avg/stack.segments.0.experts.gate_up", "f32[1,5,1,128,128]") in named
    # All state is donated: only the batch comes in without leaving, and only metrics leave.
    assert report["memory"]["argument"] - report["memory"]["alias"] < 128_000
    kernels = Counter()
    for kernel in report["kernels"]:
        routed = kernel["name"] in OWN_COPIES
        source = "static schedule at random routing" if routed else "static schedule"
        assert kernel["source"].split(",")[0] == source
        assert kernel["modelled_s"] > 0
        kernels[kernel["name"]] += kernel["count"]
    # Two products a layer: forward, recomputed, and the gradient of their rows. The global layer's
    # loop has one turn (the preset has one period), which the compiler unrolls; it then sees both
    # runs of that layer in one place and merges them up to the gated product, which keeps more in
    # the second.
    assert kernels == {
        "gmm_gelu_gate": 6 * 2,
        "gmm": 6 * 3,
        "gmm_gate_gradient": 6,
        "tgmm": 6 * 2,
        # Rows go to experts and back in kernels.
        "expand_rows": 5 * 2 + 1,
        "reduce_rows": 6 * 3,
        "combine_backward": 6,
    }
    kinds = {kind["kind"] for kind in report["time_by_kind"]}
    assert kinds >= {
        "attention", "routed experts", "dense matmuls", "combine and permute", "routing", "norms",
        "loss", "optimizer", "copies and formatting",
    }  # fmt: skip
    other = next(k["count"] for k in report["time_by_kind"] if k["kind"] == "other")
    assert other < sum(k["count"] for k in report["time_by_kind"]) / 10
    # Nothing is a bound for want of a model; a square matrix multiplies either way.
    assert not any(
        unknown.startswith("kernel") and "bound" in unknown for unknown in report["unknowns"]
    )
    assert report["routing"].startswith("each of 512 tokens a chip chooses 2 of 8 experts")
    assert not any("sort" in unknown or "trip count" in unknown for unknown in report["unknowns"])
    # Each collective once, though chains of fusions carry some: no more than the layers need.
    gathers = next(use for use in report["collectives"] if use["kind"] == "all-gather")
    assert 0 < gathers["num_asynchronous"] < gathers["count"] < 130
    # Gradients of all matrices are summed in precision.reduce, float32, whatever computes them.
    program = hlo.Program((folder / "program.hlo").read_text())
    found = ((begins(program, each), each.instruction.shape) for each in program.executed())
    sums = [shape for one, shape in found if one and one.kind in ("all-reduce", "reduce-scatter")]
    assert len(sums) > 8 and not any("bf16[" in shape for shape in sums)
    # The table is gathered once, and in bf16.
    executed = [each.instruction.shape for each in program.executed() if begins(program, each)]
    tables = [shape for shape in executed if "[256,128]{" in shape]
    assert len(tables) == 1 and tables[0].startswith("bf16[256,128]")
