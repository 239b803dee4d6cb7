"""The static profile of kernels: dumps, steps, time. One small kernel is really compiled."""

import dataclasses
import tempfile

import numpy as np
import pytest

from benchmarks import kernel_entry, kernel_profile, kernel_registry, routings
from pallas_ops.chips import V6E
from pallas_ops.tiling import Tiles
from train.compile.static import dump
from train.compile.static.grid_steps import GridSteps, window_steps
from train.compile.static.kernel_steps import PipelineSteps
from train.compile.static.schedule import (
    Region,
    find_copies,
    find_regions,
    parse_schedule,
    read_schedule,
    split_bundles,
)
from train.compile.static.step_time import CLOCK_HZ, Visit, kernel_regions, modelled_time, step_sums

# By hand, in the format of libtpu 0.0.21: a loop of 38 bundles; in it the pipeline's guard of 24,
# and in that an `if` of 5 with an `else` of 3, and an inner loop of 6.
BUNDLES = """\
= control target key start
LB: loop body
PF: predicated region fallthrough
= control target key end

     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: bf16[64,256], index: 0] } /* entry bundle */
   0x1   :  { %s2_s1 = smov 0 } /* Start region 1 :: End region 1 */
   0x2 LB: > { %p0 = scmp.lt.s32.totalorder %s2_s1, 4 } /* Start region 9 */
   0x3   : > { %40 = shalt.err (!%p9) /* BoundsCheck 3 [deref of %s7] for %11 = dma.hbm_to_vmem \
[thread:$0]  (!%p1), /*hbm=*/%s7, /*size_in_granules=*/64, /*vmem=*/%s8, /*dst_syncflagno=*/%s9 /*
base_bounds: (8, 2)
 */ }
   0x4   : > { %11 = dma.hbm_to_vmem [thread:$0]  (!%p1), /*hbm=*/%s7, /*size_in_granules=*/256, \
/*vmem=*/%s8, /*dst_syncflagno=*/%s9 /*
base_bounds: (8, 2)
window_bounds: (2, 2)
iteration_bounds: (1, 4, 1)
element_size_in_bytes: 2048
second_minor_factor: 1 */ } /* Start region 25 :: End region 25 */
   0x5   : > { %12 = sbr.rel (%p2) target bundleno = 99 (0x63), region = 28  ;;  %v0 = vmov 0.0 }
   0x6   :  {}
   0x7   :  {}
   0x8   :  {}
   0x9   :  {} /* End region 26 */
   0xa   : > { %13 = sbr.rel (%p3) target bundleno = 20 (0x14), region = 31 } /* Start region 27 */
   0xb   :  {}
   0xc   :  {}
   0xd   :  {}
   0xe   :  {}
   0xf   : > { %14 = vmatprep.mubr.bf16.mxu0 %v1 } /* Start region 30 */
  0x10   : > { %15 = vmatmul.mubr.bf16.gmra.mxu0 %v1  ;;  %16 = vmatmul.mubr.bf16.gmra.mxu1 %v2 }
  0x11   :  {}
  0x12   :  {}
  0x13   :  {} /* End region 30 */
  0x14 PF: > { %17 = sbr.rel (!%p3) target bundleno = 31 (0x1f), region = 32 } /* Start region 31 */
  0x15   :  {}
  0x16   :  {}
  0x17   :  {}
  0x18   :  {} /* End region 31 */
  0x19   : > { %v7 = vld [vmem:[%s8] sm:$0xff] } /* Start region 33 */
  0x1a   : > { %18 = vmatmul.mubr.bf16.vlgmr.msra.gmra.mxu0 %v3 }
  0x1b   : > { %19 = vst [vmem:[#allocation5_spill] sm:$0xff] /*vst=*/%v4 } /* End region 33 */
  0x1c PF: >> { %v5 = vadd.f32 %v5, %v6 } /* Start/End empty region 32 :: Start region 34 */
  0x1d   : >> { %20 = sbr.rel (!%p4) target bundleno = 31 (0x1f), region = 34 }
  0x1e   :  {}
  0x1f   :  {}
  0x20   :  {}
  0x21   :  {} /* End region 34 */
  0x22 PF: > { %21 = dma.vmem_to_hbm [thread:$0]  (%p5), /*vmem=*/%s8, \
/*size_in_granules=*/%s10, /*hbm=*/%s11, /*dst_syncflagno=*/%s12 /*
base_bounds: (8, 1)
window_bounds: (2, 1)
iteration_bounds: (1, 4, 1)
element_size_in_bytes: 2048
second_minor_factor: 1 */ } /* Start/End empty region 28 */
  0x23   : > { %22 = sbr.rel (!%p6) target bundleno = 2 (0x2), region = 9 }
  0x24   :  {}
  0x25   :  {}
  0x26   :  {}
  0x27   :  {}
  0x28   :  { %23 = vsyncpa [#allocation9], 1 } /* exit bundle: %gmm.1 = custom-call(%Arg_0.1) */
"""
NUM_BUNDLES = 41
UTILIZATION = """\
== CAPACTIY:
  MXU|  XLU| VALU|  EUP| LOAD|STORE| SALU
    2     2     4     1     3     2     2
== UTILIZATION:
""" + "".join("2 0 0 0 0 0 1\n" if i == 0x10 else "0 0 1 0 0 0 0\n" for i in range(NUM_BUNDLES))
ALLOCATIONS = """\
  #allocation2 [shape = 'f32[8,128]{1,0}', space=vmem, size = 0x1000, offset = 0, tag = 'scratch']
  #allocation8 [shape = 'u8[8192]{0}', space=vmem, size = 0x2000, offset = 0x1000, tag = 'span']
  #allocation5_spill [shape = 'u32[8,128]{1,0}', space=vmem, size = 0x1000, offset = 0x3000]
  #allocation4 [shape = 'u8[4096]{0}', space=smem, size = 0x1000, offset = 0x9000, tag = 'smem']
"""
ONES = np.ones(NUM_BUNDLES)


def schedule():
    return parse_schedule(BUNDLES, UTILIZATION, ALLOCATIONS)


def steps_of(fetched, written):
    size = len(fetched)
    return GridSteps((size,), (np.arange(size),), (), (), (), np.array(fetched), np.array(written))


def visits(*times):
    return tuple(Visit(str(i), lambda steps, t=t: np.asarray(t)) for i, t in enumerate(times))


def test_bundles_keep_their_comments_of_several_lines():
    listing = split_bundles(BUNDLES)
    assert len(listing) == NUM_BUNDLES
    assert "window_bounds: (2, 2)" in listing[4] and "entry bundle" in listing[0]


def test_loops_guards_and_else_are_nested_by_their_branches():
    parsed = schedule()
    loop = parsed.main_loop
    assert (loop.kind, loop.first, loop.last) == ("loop", 2, 40)
    (guard,) = loop.children
    assert (guard.kind, guard.first, guard.last) == ("guard", 10, 34)
    spans = [(r.kind, r.first, r.last) for r in guard.children]
    assert spans == [("guard", 15, 20), ("guard", 25, 28), ("loop", 28, 34)]
    assert guard.own(ONES) == 10 and loop.own(ONES) == 14


def test_copies_have_static_or_unknown_sizes_and_bounds_checks_are_none():
    fetch, write = find_copies(split_bundles(BUNDLES))
    assert (fetch.bundle, fetch.direction, fetch.nbytes) == (4, "hbm_to_vmem", 256 * 32)
    assert (write.bundle, write.direction, write.nbytes) == (34, "vmem_to_hbm", None)
    assert fetch.window["iteration_bounds"] == (1, 4, 1)


def test_slots_products_and_vmem():
    parsed = schedule()
    assert parsed.capacity == {
        "MXU": 2, "XLU": 2, "VALU": 4, "EUP": 1, "LOAD": 3, "STORE": 2, "SALU": 2,
    }  # fmt: skip
    assert parsed.slots["MXU"].sum() == 2 and parsed.slots["VALU"].sum() == NUM_BUNDLES - 1
    assert parsed.vmatmuls.sum() == 3 and parsed.vmatmuls[0x10] == 2
    assert parsed.vmem_bytes == 0x4000


def test_files_that_disagree_are_refused():
    with pytest.raises(ValueError, match="41 bundles but 40 rows of utilization"):
        parse_schedule(BUNDLES, UTILIZATION.rstrip("\n").rsplit("\n", 1)[0], ALLOCATIONS)


def test_regions_that_overlap_are_refused():
    def bundle(index, text="", comment=""):
        return f" {{ {text} }} {comment}"

    listing = [bundle(i) for i in range(24)]
    listing[0] = bundle(0, "%1 = sbr.rel (%p) target bundleno = 12 (0xc), region = 1")
    listing[12] = bundle(12, comment="/* Start region 1 */")
    listing[14] = bundle(14, "%1 = sbr.rel (%p) target bundleno = 8 (0x8), region = 2")
    listing[8] = bundle(8, comment="/* Start region 2 */")
    with pytest.raises(ValueError, match=r"regions \[5, 12\) and \[8, 19\) overlap"):
        find_regions(listing)


def test_the_last_compiled_of_a_name_is_read(tmp_path):
    def write(stamp, name, bundles):
        for number, suffix, text in (
            (68, "post-delay-converter", ALLOCATIONS),
            (69, "final_hlo-static-per-bundle-utilization", UTILIZATION),
            (71, "final_bundles", bundles),
        ):
            (tmp_path / f"{stamp}-{name}-{number}-{suffix}.txt").write_text(text)

    write(100, "gmm.1", "another format")
    write(200, "gmm.1", BUNDLES)
    write(300, "tgmm.1", "another format")
    (tmp_path / "200-gmm.1-70-schedule-analysis_final_bundles.txt").write_text("no bundles")
    assert read_schedule(tmp_path, "gmm").num_bundles == NUM_BUNDLES
    with pytest.raises(ValueError, match=r"no schedule of 'splash'.*'gmm.1', 'tgmm.1'"):
        read_schedule(tmp_path, "splash")


def test_a_program_without_a_loop_is_refused():
    lines = [line for line in BUNDLES.splitlines(keepends=True) if "region = 9" not in line]
    lines = [line for line in lines if "region = 34" not in line]
    rows = UTILIZATION.splitlines(keepends=True)
    with pytest.raises(ValueError, match="no loop"):
        _ = parse_schedule("".join(lines), "".join(rows[:-2]), ALLOCATIONS).main_loop


def test_a_step_pays_for_the_regions_it_runs():
    steps = steps_of([0] * 3, [0] * 3)
    # Outside all regions 24 bundles; `if` 5, `else` 3, inner loop 6 a trip.
    taken = visits([True, False, False], [False, True, False], [1, 4, 0])
    assert step_sums(schedule(), steps, taken, ONES).tolist() == [24 + 5 + 6, 24 + 3 + 24, 24]
    slots = step_sums(schedule(), steps, taken, schedule().slots["MXU"])
    assert slots.tolist() == [2, 0, 0]


def test_guards_that_issue_copies_are_not_the_kernels():
    copies = Region("guard", 2, 9, (Region("guard", 3, 5, ()),))
    body = Region("guard", 10, 28, (Region("guard", 12, 20, ()),))
    none = dataclasses.replace(schedule(), roots=(Region("loop", 0, 30, (copies, body)),))
    assert kernel_regions(none) == [*body.children]
    assert step_sums(none, steps_of([0], [0]), visits(0), ONES).tolist() == [30 - 8]


def test_entries_must_name_every_region():
    with pytest.raises(ValueError, match=r"guard of 5 bundles.*loop of 6 bundles.*names \['0'\]"):
        step_sums(schedule(), steps_of([0], [0]), visits(True), ONES)


def test_time_is_the_longer_of_bundles_and_copies_in_flight():
    rate = V6E.hbm_bytes_per_s
    steps = steps_of([2e-6 * rate, 0, 5e-6 * rate], [0, 3e-6 * rate, 1e-6 * rate])
    bundles = CLOCK_HZ * np.array([1e-6, 2e-6, 4e-6])
    # Step 1 has the fetch of step 2 in flight, step 2 the write of step 1.
    time = modelled_time(bundles, steps, fixed_bundles=int(CLOCK_HZ * 1e-6))
    assert time.total == pytest.approx(1e-6 + 2e-6 + (1 + 5 + 4) * 1e-6 + 1e-6)
    assert time.compute == pytest.approx(1e-6 + 7e-6)
    assert time.dma == pytest.approx(2e-6 + 5e-6 + 3e-6 + 1e-6)
    assert time.num_dma_bound == 1


def test_windows_of_a_fusion():
    steps = window_steps(find_copies(split_bundles(BUNDLES)))
    assert steps.grid == (1, 4, 1)
    assert steps.fetched.tolist() == [8192] * 4 and steps.written.tolist() == [4096] * 4
    ragged = find_copies(
        split_bundles(BUNDLES.replace("window_bounds: (2, 2)", "window_bounds: (3, 2)"))
    )
    assert window_steps(ragged).fetched.tolist() == [12288, 12288, 8192, 0]
    with pytest.raises(ValueError, match="no copy of this kernel names its windows"):
        window_steps(())


def double(x, *, interpret):
    return (2 * x,)


def test_routings():
    balanced = routings.group_sizes("balanced", 4096, 8)
    assert balanced.sum() == 4096 and len(set(balanced)) > 1 and balanced.dtype == np.int32
    worst = routings.group_sizes("worst", 4096, 8)
    bounds = np.cumsum(worst)[:-1]
    assert set(routings.group_sizes("aligned", 4096, 8)) == {512}
    assert worst.sum() == 4096 and all(np.all(bounds % tile) for tile in (16, 48, 128, 512))
    with pytest.raises(ValueError, match="routing='even' is unknown"):
        routings.group_sizes("even", 8, 2)


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"op='gm' is unknown.*'gmm'"):
        kernel_registry.kernels("gm")
    with pytest.raises(ValueError, match=r"gmm has no shape 'wx'.*'wi forward'"):
        kernel_registry.find("gmm", "wx")
    with pytest.raises(ValueError, match="name it with --op"):
        kernel_profile.Options(shape="wi forward")
    with pytest.raises(ValueError, match="chooses its own tiles"):
        kernel_registry.kernels("xla_matmul", Tiles(16, 16, 16))


def test_selection_leaves_out_tiny_shapes_and_public_kernels():
    def names(**options):
        found = kernel_profile.selected(kernel_profile.Options(**options))
        return [(kernel.op, kernel.shape) for kernel in found]

    assert len(names()) == 11 and {op for op, _ in names()} == {"gmm", "expert_mlp", "tgmm"}
    assert {op for op, _ in names(calibrate=True)} == {"megablox", "xla_matmul"}
    assert names(op="all", calibrate=True) == names() + names(calibrate=True)
    assert names(op="gmm", shape="whole tiles") == [("gmm", "whole tiles")]
    kernel, *_ = kernel_profile.selected(kernel_profile.Options(op="megablox", tiles=(16, 8, 8)))
    assert kernel.static["tiles"] == Tiles(16, 8, 8)


def test_estimate_of_a_hand_made_schedule():
    entry = kernel_entry.Kernel("op", "shape", double, (), 10**6, "op", visits=visits(1, 0, 2))
    steps = PipelineSteps(steps_of([8192] * 4, [4096] * 4), entry.visits)
    row = kernel_profile.estimate(entry, schedule(), steps)
    seconds = 3 / CLOCK_HZ + 4 * 41 / CLOCK_HZ + (8192 + 4096) / V6E.hbm_bytes_per_s
    assert row["bundles"] == 24 + 5 + 12 and row["dma_bytes"] == 4 * 12288
    assert row["bundles_by_region"] == {"every step": 24, "0": 5, "1": 3, "2": 6}
    assert row["mxu_floor_bundles"] == 2 * 8 // 2 and row["mxu_occupancy"] == round(1 / 41, 4)
    assert row["est_us"] == pytest.approx(1e6 * seconds, abs=1e-3) and row["vmem_bytes"] == 0x4000
    assert "not measured" in row["source"]


@pytest.mark.libtpu
def test_what_the_compiler_says_is_passed_on(tmp_path):
    with pytest.raises(RuntimeError, match=r"nothing does not compile for v6e: .*custom op 'no'"):
        dump.compile_with_dump("nothing", b"no module", tmp_path)


def three_branches(x, *, interpret):
    import jax
    from jax.experimental import pallas as pl

    def body(x_block, out_block):
        for i in range(3):

            @pl.when(pl.program_id(0) == i)
            def _multiply(i=i):
                out_block[...] = i * x_block[...]

    block = pl.BlockSpec((8, 128), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct((32, 128), "float32")
    call = pl.pallas_call(
        body, grid=(4,), in_specs=[block], out_specs=block, out_shape=out, interpret=interpret
    )
    return (call(x),)


def test_visits_may_be_left_to_the_body(monkeypatch):
    signature = (((32, 128), "float32"),)
    entry = kernel_entry.Kernel("op", "shape", three_branches, signature, 10**6, "op", visits=None)
    monkeypatch.setattr(kernel_profile, "lowered", lambda _: b"")
    monkeypatch.setattr(kernel_profile, "compile_with_dump", lambda *_: 1.0)
    monkeypatch.setattr(kernel_profile, "read_schedule", lambda *_: schedule())
    # The hand-made schedule has three regions, as the body has.
    (row,) = kernel_profile.profile(entry, ("worst",))
    assert list(row["bundles_by_region"]) == ["every step", "branch 0", "branch 1", "branch 2"]
    one_region = dataclasses.replace(
        schedule(), roots=(Region("loop", 0, 30, (Region("guard", 2, 20, ()),)),)
    )
    monkeypatch.setattr(kernel_profile, "read_schedule", lambda *_: one_region)
    with pytest.raises(ValueError, match="left 0 regions of the body's 3; name their visits"):
        kernel_profile.profile(entry, ("worst",))


@pytest.mark.libtpu
def test_a_small_kernel_end_to_end(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    entry = kernel_registry.find("gmm", "whole tiles")
    (row,) = kernel_profile.profile(entry, ("worst",))
    assert list(tmp_path.iterdir()) == []  # dumps are deleted
    assert row["tiles"] == ["128x128", "128x128"]
    assert row["num_steps"] == row["num_live_steps"] == 2 + 3
    # With 128 columns to contract, one product takes two groups of 16 rows: 4 for 128 rows.
    assert row["mxu_floor_bundles"] == 4 * 8 // 2 <= row["bundles"]
    assert row["vmem_bytes"] >= 4 * 128 * 128
    assert list(row["bundles_by_region"]) == ["rest", "64 rows", "128 rows", "a matrix sent for"]
