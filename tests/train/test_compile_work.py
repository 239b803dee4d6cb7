"""What instructions of a compiled step move, send and are, on small programs."""

import pytest

from train.compile import hlo, kinds
from train.compile.model_time import LINK_BYTES_PER_S, MODEL_BYTES_PER_S, StepModel
from train.compile.topology import TOPOLOGIES
from train.compile.traffic import hbm_bytes

SLICES = """HloModule step

%fused_slice (p0: f32[5,100], p1: s32[]) -> f32[1,100] {
  %p0 = f32[5,100]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %view = f32[5,100]{1,0} bitcast(%p0)
  ROOT %sliced = f32[1,100]{1,0} dynamic-slice(%view, %p1, %p1), dynamic_slice_sizes={1,100}
}

%fused_update (p0.1: f32[5,100], p1.1: f32[1,100], p2.1: s32[]) -> f32[5,100] {
  %p0.1 = f32[5,100]{1,0} parameter(0)
  %p1.1 = f32[1,100]{1,0} parameter(1)
  %p2.1 = s32[] parameter(2)
  %twice = f32[1,100]{1,0} add(%p1.1, %p1.1)
  ROOT %updated = f32[5,100]{1,0} dynamic-update-slice(%p0.1, %twice, %p2.1, %p2.1)
}

%fused_both (p0.2: f32[5,100]) -> f32[5,100] {
  %p0.2 = f32[5,100]{1,0} parameter(0)
  ROOT %plus = f32[5,100]{1,0} add(%p0.2, %p0.2)
}

ENTRY %main (stack: f32[5,100], i: s32[]) -> f32[5,100] {
  %stack = f32[5,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,100]{1,0:T(8,128)S(1)} fusion(%stack, %i), kind=kLoop, calls=%fused_slice
  %bare = f32[1,100]{1,0} dynamic-slice(%stack, %i, %i), dynamic_slice_sizes={1,100}
  %new = f32[5,100]{1,0} fusion(%stack, %row, %i), kind=kLoop, calls=%fused_update
  %put = f32[5,100]{1,0} dynamic-update-slice(%stack, %bare, %i, %i)
  %all = f32[5,100]{1,0} fusion(%new), kind=kLoop, calls=%fused_both
  %fetch = (f32[5,100]{1,0:S(1)}, f32[5,100]{1,0}, u32[]) copy-start(%all)
  ROOT %out = f32[5,100]{1,0} copy-done(%fetch)
}
"""


def moved(text, name):
    program = hlo.Program(text)
    (executed,) = [e for e in program.executed() if e.instruction.name == name]
    return hbm_bytes(program, executed)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("row", 400 + 4),  # of the stack only a row, which goes to VMEM
        ("bare", 400 + 4 + 4 + 400),
        ("new", 0 + 4 + 400),  # in place, and the row comes from VMEM
        ("put", 400 + 400),
        ("all", 2000 + 2000),
        ("fetch", 2000),
    ],
)
def test_only_what_moves_in_hbm_is_counted(name, expected):
    assert moved(SLICES, name) == expected


def chain(compute_cycles):
    """An all-gather carried by a product, and one that nothing hides."""
    return f"""HloModule step

%start (p: bf16[4,100]) -> (bf16[4,100], bf16[16,100]) {{
  %p = bf16[4,100]{{1,0}} parameter(0)
  %g = bf16[16,100]{{1,0}} all-gather(%p), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, \
frontend_attributes={{chain_id="0"}}
  ROOT %begun = (bf16[4,100]{{1,0}}, bf16[16,100]{{1,0}}) custom-call(%p, %g), \
custom_call_target="AsyncCollectiveStart"
}}

%carry (q: bf16[4,100], r: bf16[16,100], a: bf16[8,8]) -> (bf16[8,8], bf16[16,100]) {{
  %q = bf16[4,100]{{1,0}} parameter(0)
  %r = bf16[16,100]{{1,0}} parameter(1)
  %a = bf16[8,8]{{1,0}} parameter(2)
  %g.1 = bf16[16,100]{{1,0}} all-gather(%q), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, \
frontend_attributes={{chain_id="0"}}
  %d = bf16[8,8]{{1,0}} dot(%a, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %pair = (bf16[8,8]{{1,0}}, bf16[16,100]{{1,0}}) tuple(%d, %g.1)
}}

%done (s: bf16[16,100]) -> bf16[16,100] {{
  %s = bf16[16,100]{{1,0}} parameter(0)
  %g.2 = bf16[16,100]{{1,0}} all-gather(%s), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, \
frontend_attributes={{chain_id="0"}}
  ROOT %ended = bf16[16,100]{{1,0}} custom-call(%g.2), custom_call_target="AsyncCollectiveDone"
}}

%all-reduce-scatter.1 (i: f32[8,4]) -> f32[2,4] {{
  %i = f32[8,4]{{1,0}} parameter(0)
  %sum = f32[8,4]{{1,0}} all-reduce(%i), replica_groups=[1,4]<=[4], to_apply=%add
  %zero = s32[] constant(0)
  ROOT %own = f32[2,4]{{1,0}} dynamic-slice(%sum, %zero, %zero), dynamic_slice_sizes={{2,4}}
}}

ENTRY %main (x: bf16[4,100], w: bf16[8,8], y: f32[8,4]) -> f32[2,4] {{
  %x = bf16[4,100]{{1,0}} parameter(0)
  %w = bf16[8,8]{{1,0}} parameter(1)
  %y = f32[8,4]{{1,0}} parameter(2)
  %first = (bf16[4,100]{{1,0}}, bf16[16,100]{{1,0}}) fusion(%x), kind=kCustom, calls=%start
  %x0 = bf16[4,100]{{1,0}} get-tuple-element(%first), index=0
  %x1 = bf16[16,100]{{1,0}} get-tuple-element(%first), index=1
  %middle = (bf16[8,8]{{1,0}}, bf16[16,100]{{1,0}}) fusion(%x0, %x1, %w), kind=kCustom, \
calls=%carry, backend_config={{"estimated_cycles":"{compute_cycles}"}}
  %x2 = bf16[16,100]{{1,0}} get-tuple-element(%middle), index=1
  %last = bf16[16,100]{{1,0}} fusion(%x2), kind=kCustom, calls=%done
  ROOT %scattered = f32[2,4]{{1,0}} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.1
}}
"""


def model(text):
    return StepModel(hlo.Program(text), TOPOLOGIES["v6e-8"].chip, {})


def test_a_chain_of_fusions_is_one_collective_and_its_compute_is_compute():
    found = {c.kind: c for _, c in model(chain(1750)).collectives()}
    assert set(found) == {"all-gather", "reduce-scatter"}
    gather, scatter = found["all-gather"], found["reduce-scatter"]
    assert (gather.bytes, gather.group_size, gather.is_asynchronous) == (3200, 4, True)
    assert gather.link_bytes == 2400
    assert (scatter.bytes, scatter.group_size, scatter.is_asynchronous) == (128, 4, False)
    (work,) = model(chain(1750)).work()
    assert (work.kind, work.seconds) == ("dense matmuls", pytest.approx(1e-6))
    assert work.bytes <= 4 * 800 + 2 * 128


def test_compute_hides_what_it_has_time_for():
    gather_s, scatter_s = 2400 / LINK_BYTES_PER_S, 96 / LINK_BYTES_PER_S
    assert model(chain(10**6)).exposed_s == pytest.approx(scatter_s)
    half = int(1.75e9 * gather_s / 2)
    waited = gather_s - half / 1.75e9 + scatter_s
    assert model(chain(half)).exposed_s == pytest.approx(waited)


PERMUTES = """HloModule m

ENTRY %main (x: f32[1000], y: f32[8]) -> f32[8] {
  %x = f32[1000]{0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %a = (f32[1000]{0}, f32[1000]{0}) collective-permute-start(%x), source_target_pairs={{0,1}}
  %b = (f32[8]{0}, f32[8]{0}) collective-permute-start(%y), source_target_pairs={{0,1}}
  %b-done = f32[8]{0} collective-permute-done(%b)
  %a-done = f32[1000]{0} collective-permute-done(%a)
  %late = f32[1000]{0} add(%a-done, %a-done)
}
"""


def test_collectives_share_the_links_and_each_end_waits_for_its_own_begin():
    whole = (4000 + 32) / LINK_BYTES_PER_S
    assert model(PERMUTES).exposed_s == pytest.approx(whole)  # b waits behind a
    first = PERMUTES.replace("  %b-done = f32[8]{0} collective-permute-done(%b)\n", "")
    assert model(first).exposed_s == pytest.approx(4000 / LINK_BYTES_PER_S)


def test_an_all_reduce_passes_the_links_twice_and_a_permute_whole():
    def link_bytes(line):
        text = "HloModule m\n\nENTRY %main (x: f32[8]) -> f32[8] {\n"
        text += f"  %x = f32[8]{{0}} parameter(0)\n  ROOT %c = {line}\n}}\n"
        ((_, collective),) = model(text).collectives()
        return collective.link_bytes, collective.is_asynchronous

    reduce = "f32[8]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add"
    assert link_bytes(reduce) == (2 * 32 * 3 / 4, False)
    permute = "(f32[8]{0}, f32[8]{0}) collective-permute-start(%x), source_target_pairs={{0,1}}"
    assert link_bytes(permute) == (32, True)


def instruction(rest, opcode="add"):
    return hlo.Instruction("n", "f32[8]{0}", opcode, rest)


@pytest.mark.parametrize(
    ("rest", "kind"),
    [
        ('%a), metadata={op_name="x/torch_gemma4.norm.7/aten__mul.1/aten__mul"}', "norms"),
        ('%a), metadata={op_name="train.step.1/torch_gemma4.moe.2/pallas_ops.combine.op.3/x"}',
         "combine and permute"),
        ('%a), metadata={op_name="x/aten__mul" source_file="/home/train/w/train/optim.py"}',
         "optimizer"),
        ('%a), metadata={op_name="x/aten__mul" source_file="/a/torch_gemma4/decoder.py"}', "other"),
        ('%a), metadata={op_name="reduce_sum" source_file="/a/torch/autograd/x.py"}', "other"),
        ("%a)", "other"),
    ],
)  # fmt: skip
def test_kinds_are_the_files_that_asked(rest, kind):
    assert kinds.kind_of(None, instruction(rest)) == kind


def test_what_only_moves_is_formatting_whoever_asked():
    asked = '%a), metadata={op_name="x/torch_gemma4.norm.7/aten__t"}'
    assert kinds.kind_of(None, instruction(asked, "transpose")) == "copies and formatting"
    assert kinds.kind_of(None, instruction(asked, "copy-start")) == "prefetch into VMEM"
    assert kinds.kind_of(None, instruction("%a, %b)", "dot")) == "dense matmuls"


FUSED = """HloModule m

%fused (a: bf16[8,8]) -> f32[8] {
  %a = bf16[8,8]{1,0} parameter(0)
  %d = bf16[8,8]{1,0} dot(%a, %a), metadata={op_name="x/torch_gemma4.loss.4/aten__mm"}
  ROOT %r = f32[8]{0} reduce(%d), metadata={op_name="x/torch_gemma4.norm.5/aten__sum"}
}

ENTRY %main (x: bf16[8,8]) -> f32[8] {
  %x = bf16[8,8]{1,0} parameter(0)
  ROOT %f = f32[8]{0} fusion(%x), calls=%fused, metadata={op_name="x/torch_gemma4.norm.5/aten__sum"}
}
"""


def test_a_fused_product_decides_its_fusions_kind():
    (work,) = model(FUSED).work()
    assert work.kind == "loss"
    (work,) = model(FUSED.replace(" dot(%a, %a)", " multiply(%a, %a)")).work()
    assert work.kind == "norms"
    bare = FUSED.replace(', metadata={op_name="x/torch_gemma4.norm.5/aten__sum"}', "")
    (work,) = model(bare.replace(" dot(%a, %a)", " multiply(%a, %a)")).work()
    assert work.kind == "loss"  # of what is inside


def test_a_second_run_is_known_by_its_scope_and_by_a_product_within():
    named = '%a), metadata={op_name="call.3/rerun.5/torch_gemma4.norm.7/aten__mul"}'
    assert kinds.is_rerun(None, instruction(named))
    assert not kinds.is_rerun(None, instruction(named.replace("rerun.5/", "")))
    assert not kinds.is_rerun(None, instruction("%a)"))
    (work,) = model(FUSED).work()
    assert not work.is_rerun
    (work,) = model(FUSED.replace("x/torch_gemma4.loss", "rerun.1/torch_gemma4.loss")).work()
    assert work.is_rerun
    (work,) = model(FUSED.replace("x/torch_gemma4.norm", "rerun.1/torch_gemma4.norm")).work()
    assert not work.is_rerun  # its product is none


def test_markers_and_waits_are_no_work():
    call = '%a), custom_call_target="AssumeGatherIndicesInBound"'
    assert not kinds.is_work(instruction(call, "custom-call"))
    assert not kinds.is_work(instruction("%a)", "copy-done"))
    assert not kinds.is_work(instruction("0)", "parameter"))
    assert kinds.is_work(instruction("%a)", "exponential"))


HOST = """HloModule m

ENTRY %main (x: f32[1,100], i: s32[]) -> f32[5,100] {
  %x = f32[1,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %stack = f32[5,100]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %put = ((f32[5,100]{1,0:S(5)}, f32[1,100]{1,0}, s32[], s32[]), f32[5,100]{1,0:S(5)}, u32[]) \
dynamic-update-slice-start(%stack, %x, %i, %i)
  %kept = f32[5,100]{1,0:S(5)} dynamic-update-slice-done(%put)
  %get = ((f32[5,100]{1,0:S(5)}, s32[], s32[]), f32[1,100]{1,0}, u32[]) \
dynamic-slice-start(%kept, %i, %i), dynamic_slice_sizes={1,100}
  %row = f32[1,100]{1,0} dynamic-slice-done(%get)
  %all = (f32[5,100]{1,0}, f32[5,100]{1,0:S(5)}, u32[]) copy-start(%kept)
  %fetch = (f32[1,100]{1,0:S(1)}, f32[1,100]{1,0}, u32[]) copy-start(%row)
  ROOT %out = f32[5,100]{1,0} copy-done(%all)
}
"""


def test_copies_to_the_host_and_back_are_told_and_not_modelled():
    step = model(HOST)
    assert step.host_copies() == (3, 400 + 400 + 2000)
    assert [work.executed.instruction.name for work in step.work()] == ["fetch"]
    assert model(SLICES).host_copies() == (0, 0)


def test_every_file_that_has_a_kind_exists():
    from pathlib import Path

    root = Path(kinds.__file__).parents[2]
    for name in kinds.BY_FILE:
        path = root / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


def test_bandwidth_is_that_of_the_model():
    text = SLICES
    (work,) = [w for w in model(text).work() if w.executed.instruction.name == "all"]
    assert work.seconds == pytest.approx(4000 / MODEL_BYTES_PER_S)
