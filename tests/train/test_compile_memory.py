"""Memory of a compiled step: buffer assignment, buffers by our names, refusals and remedies."""

from dataclasses import replace

import pytest

from torch_gemma4.accounting import state_bytes
from train.compile.assignment import LiveBuffer, parse_assignment
from train.compile.buffers import Buffer, buffers_at_peak, buffers_of_message, our_name
from train.compile.command import on_topology, refusal
from train.compile.exhausted import parse_exhausted
from train.compile.hlo import Program
from train.compile.remedies import best_remedies
from train.compile.topology import TOPOLOGIES, find_topology, next_larger
from train.presets import cpu_tiny, gemma4_26b_a4b

ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <1 add.2 @0> (size=512,offset=0): s32[]{:T(128)}
allocation 1: size 4000, parameter 7, shape |f32[1000]| at ShapeIndex {}, maybe-live-out:
 value: <2 param.36 @0> (size=4000,offset=0): f32[1000]{0:T(8,128)}
allocation 2: size 300, parameter 2, shape |s32[75]| at ShapeIndex {}:
allocation 3: size 64, maybe-live-out:
allocation 4: size 32, output shape is |(f32[], f32[])|, maybe-live-out:
allocation 5: size 16, constant:
allocation 6: size 9000, preallocated-temp:
allocation 7: size 77777, color 1, preallocated-temp:
allocation 8: size 8000, color 5, preallocated-temp:
 value: <35 sent @5> (size=8000,offset=0): bf16[5,800]{1,0:T(8,128)(2,1)S(5)}

  Live ranges at 3 (peak):
    small{}: 10 bytes (cumulative: 10 bytes)

  Live ranges at 38 (peak):
    loop{1}: 5000 bytes (cumulative: 5000 bytes)
    call.1/y{}: 6000 bytes (cumulative: 11000 bytes)
    sent{}: 8000 bytes (cumulative: 19000 bytes)
"""

HLO = """HloModule step, is_scheduled=true

%body (state: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %state = (s32[], bf16[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[8,16]{1,0} get-tuple-element(%state), index=1
  %y = bf16[8,16]{1,0} add(%x, %x), metadata={op_name="call.3/torch_gemma4.moe.2/aten__add.7"}
  %kept = bf16[8,16]{1,0} copy(%y)
  ROOT %next = (s32[], bf16[8,16]{1,0}) tuple(%i, %kept)
}

%condition (state.1: (s32[], bf16[8,16])) -> pred[] {
  %state.1 = (s32[], bf16[8,16]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: bf16[8,16], b: f32[4,4]) -> bf16[8,16] {
  %b = f32[4,4]{1,0} parameter(1)
  %a = bf16[8,16]{1,0} parameter(0)
  %fast = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} negate(%a)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[8,16]{1,0}) tuple(%zero, %a)
  %loop = (s32[], bf16[8,16]{1,0}) while(%start), condition=%condition, body=%body
  ROOT %out = bf16[8,16]{1,0} get-tuple-element(%loop), index=1
}
"""

MESSAGE = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory \
space hbm. Used 35.70G of 31.25G hbm. Exceeded hbm capacity by 4.45G.

Total hbm usage >= 35.95G:
    reserved        260.06M

  Largest program allocations in hbm:

  1. Size: 1.38G
     Operator: op_name="call.1/call.2/jit(permute)/shard_map/gather" source_file="kernel.py"
     Shape: bf16[262144,2816]{1,0:T(8,128)(2,1)}
     Unpadded size: 1.38G
     XLA label: fusion.1912.remat2 = fusion(bitcast.2092, copy-done.82), kind=kCustom
     Allocation type: HLO temp
     ==========================

  2. Size: 1.00G
     Operator: op_name="torch_gemma4.loss.4/aten__mm.5725"
     Shape: bf16[2,1024,262144]{2,1,0:T(8,128)(2,1)}
     XLA label: fusion.1033 = fusion(copy.3325), kind=kOutput
     ==========================

  3. Size: 1.00G
     Operator: op_name="torch_gemma4.loss.9/aten__mm.31"
     Shape: bf16[2,1024,262144]{2,1,0:T(8,128)(2,1)}
     XLA label: fusion.1040 = fusion(copy.3325), kind=kOutput
     ==========================

  4. Size: 968.00M
     Shape: f32[88,5632]{1,0:T(8,128)}
     XLA label: param.4 = parameter(3)
     ==========================
"""


def test_assignment_counts_hbm_alone():
    found = parse_assignment(ASSIGNMENT)
    assert (found.argument_bytes, found.output_bytes) == (4300, 96)
    assert (found.temp_bytes, found.constant_bytes) == (9000, 16)
    assert found.total_bytes == 4300 + 96 + 9000 + 16
    assert found.parameters == {7: 4000, 2: 300}


def test_the_largest_peak_is_the_programs():
    assert parse_assignment(ASSIGNMENT).peak == (
        LiveBuffer("call.1/y", (), 6000),
        LiveBuffer("loop", (1,), 5000),
    )


def test_text_that_is_no_assignment():
    with pytest.raises(ValueError, match="no allocation in this text"):
        parse_assignment("hello")


def test_buffers_are_named_by_parameter_and_by_what_writes_them():
    live = [
        LiveBuffer("loop", (1,), 256),
        LiveBuffer("b", (), 512),
        LiveBuffer("a", (), 250),
        LiveBuffer("y", (), 256),
        LiveBuffer("fast", (), 999),  # in VMEM
        LiveBuffer("gone", (), 10),  # not in the program
    ]
    assert buffers_at_peak(Program(HLO), live, {1: "experts.down"}) == (
        Buffer("experts.down", "f32[4,4]", 512, 1),
        Buffer("moe: add", "bf16[8,16]", 256, 2),
        Buffer("argument 0", "bf16[8,16]", 250, 1),
        Buffer("gone", "", 10, 1),
    )
    assert len(buffers_at_peak(Program(HLO), live, {}, count=2)) == 2


def test_a_value_that_a_loop_only_carries_is_named_by_what_comes_in():
    carried = HLO.replace("tuple(%i, %kept)", "tuple(%i, %x)")
    (buffer,) = buffers_at_peak(Program(carried), [LiveBuffer("loop", (1,), 4)], {})
    assert (buffer.name, buffer.shape) == ("get-tuple-element", "bf16[8,16]")


@pytest.mark.parametrize(
    ("op_name", "name"),
    [
        ("call.1/torch_gemma4.loss.4/torch_gemma4.loss.7/aten__mm.5", "loss: mm"),
        ("call.9/call.2/jit(gmm_sharded)/shard_map/all_gather", "gmm: all gather"),
        ("a/pallas_ops.gmm.op.3/xla__gmm/jit(gmm_sharded)/jit(floor_divide)/rem", "gmm: rem"),
        ("train.optim.1/aten__mul.2/aten__mul", "optim: mul"),
        ("xla__layer_loop/dynamic-update-slice.8", "layer loop: dynamic-update-slice"),
        ("dot.5725", "dot"),
        ("", "fusion"),
    ],
)
def test_our_names(op_name, name):
    assert our_name(op_name, "fusion") == name


def test_a_refusal_is_read():
    found = parse_exhausted(MESSAGE)
    assert found.space == "hbm"
    assert found.used_bytes == round(35.70 * 2**30)
    assert found.available_bytes == round(31.25 * 2**30)
    assert found.excess_bytes == pytest.approx(4.45 * 2**30, rel=1e-6)
    assert [a.bytes for a in found.allocations][:2] == [round(1.38 * 2**30), 2**30]
    assert found.allocations[3].op_name == ""
    assert buffers_of_message(found.allocations, {3: "mlp.down_proj"}) == (
        Buffer("permute: gather", "bf16[262144,2816]", round(1.38 * 2**30), 1),
        Buffer("loss: mm", "bf16[2,1024,262144]", 2**30, 2),
        Buffer("mlp.down_proj", "f32[88,5632]", 968 * 2**20, 1),
    )


def test_one_buffer_that_is_too_large_alone():
    message = (
        "RESOURCE_EXHAUSTED: Allocation (size=137438953472) would exceed memory "
        "(size=33822867456) :: #allocation5 [shape = 'f32[131072,262144]{1,0:T(8,128)}', "
        "space=hbm, size = 0xffffffffffffffff, tag = 'output of sine.2@{}'] :: <no-hlo-instruction>"
    )
    found = parse_exhausted(message)
    assert (found.space, found.used_bytes, found.available_bytes) == ("hbm", 2**37, 33822867456)
    assert buffers_of_message(found.allocations, {}) == (
        Buffer("output of sine.2@{}", "f32[131072,262144]", 2**37, 1),
    )


def test_other_errors_are_no_refusal():
    assert parse_exhausted("INVALID_ARGUMENT: something else") is None
    config, topology = gemma4_26b_a4b(), TOPOLOGIES["v6e-128"]
    assert refusal(config, topology, "RESOURCE_EXHAUSTED: quota", {}) is None
    vmem = MESSAGE.replace("memory space hbm", "memory space vmem")
    assert refusal(config, topology, vmem, {}) is None


def test_the_report_of_a_refusal():
    config, topology = gemma4_26b_a4b(), TOPOLOGIES["v6e-128"]
    report = refusal(config, topology, MESSAGE, {3: "mlp.down_proj"})
    assert not report["fits"]
    assert report["memory"]["exceeded"] == report["memory"]["peak"] - report["memory"]["available"]
    assert [buffer["count"] for buffer in report["largest_buffers"]] == [1, 2, 1]
    assert report["recompute"]["policy"] == "full"
    assert report["recompute"]["counted_flops"] == pytest.approx(923.287e12, rel=1e-5)
    assert len(report["remedies"]) == 3
    assert all(remedy["saved_bytes"] > 0 for remedy in report["remedies"])


def remedies_of(config, topology="v6e-8", used=10**9, count=99):
    topology = find_topology(topology)
    config = on_topology(config, topology)
    found = best_remedies(config, topology, next_larger(topology), used, count)
    assert [r.saved_bytes for r in found] == sorted((r.saved_bytes for r in found), reverse=True)
    return {remedy.options.split()[0]: remedy for remedy in found}


def test_what_is_done_already_is_no_remedy():
    everything = remedies_of(cpu_tiny())
    assert set(everything) == {
        *("--accumulate", "--model.num_loss_tiles", "--recompute", "--attention"),
        *("--precision.compute", "--topology"),
    }
    config = cpu_tiny()
    done = replace(
        config,
        recompute="full",
        attention="kernel",
        precision=replace(config.precision, compute="bfloat16"),
    )
    assert set(remedies_of(done)) == {
        *("--accumulate", "--model.num_loss_tiles", "--precision.reduce", "--topology")
    }


def test_the_arithmetic_of_savings():
    config = cpu_tiny()  # 2 sequences of 128 on each of 8 chips, float32, einsum, 1 loss tile
    found = remedies_of(config)
    model = config.model
    assert found["--attention"].saved_bytes == (
        model.num_hidden_layers * 2 * model.num_attention_heads * 128**2 * 4
    )
    tiles = found["--model.num_loss_tiles"]
    assert tiles.options == "--model.num_loss_tiles 2"
    assert tiles.saved_bytes == 2 * 128 * model.vocab_size * 4 // 2
    half = found["--accumulate"]
    assert half.options == "--accumulate 2"
    assert 0.9 * 10**9 / 2 < half.saved_bytes < 10**9 / 2
    assert found["--topology"].options == "--topology v6e-16 --data.batch_size 32"


def test_a_batch_that_is_cut_already_can_be_cut_again():
    config = replace(cpu_tiny(), accumulate=2)
    whole = replace(config, data=replace(config.data, batch_size=32))
    found = remedies_of(whole)  # 4 sequences of 128 on each of 8 chips, 2 at a time
    assert found["--accumulate"].options == "--accumulate 4"
    # No sums of gradients beside those that are there.
    before = remedies_of(cpu_tiny())["--accumulate"].saved_bytes
    gradients = state_bytes(config.model, 8).gradients
    assert found["--accumulate"].saved_bytes - before == pytest.approx(gradients, abs=2)
    assert found["--topology"].options == "--topology v6e-16 --data.batch_size 64"
    tiles = remedies_of(cpu_tiny())["--model.num_loss_tiles"]
    assert found["--model.num_loss_tiles"].saved_bytes == tiles.saved_bytes


def test_what_a_policy_keeps_can_be_run_again():
    config = replace(cpu_tiny(), attention="kernel", recompute="save_attention")
    found = remedies_of(config)["--recompute"]
    assert found.options == "--recompute full"
    tokens, heads = 2 * 128, config.model.num_attention_heads
    kept = sum(heads * (spec.head_dim + 1) * 4 for spec in config.model.layers)
    assert found.saved_bytes == tokens * kept


def test_what_layers_keep_can_lie_on_the_host():
    on_host = replace(gemma4_26b_a4b(), offload_activations=True)
    assert "--offload_activations" not in remedies_of(on_host, "v6e-128")
    found = remedies_of(gemma4_26b_a4b(), "v6e-128")["--offload_activations"]
    # Of 30 layers all but 3 periods of 6; the compiler saves 2.77 GB (docs/optimisation.md).
    assert found.saved_bytes == 12 * 32_768 * 2816 * 2


def test_an_odd_number_of_sequences_is_shortened():
    config = cpu_tiny()
    one = replace(config, data=replace(config.data, batch_size=8))
    found = remedies_of(one)
    assert "--accumulate" not in found
    assert found["--data.sequence_length"].options == "--data.sequence_length 64"


def test_the_26bs_expert_gradients_in_bfloat16():
    found = remedies_of(gemma4_26b_a4b(), "v6e-128", used=int(38e9))
    assert found["--precision.reduce"].saved_bytes == 3 * 128 * 704 * 2816 * 2


def test_the_largest_slice_has_none_above():
    assert next_larger(TOPOLOGIES["v6e-256"]) is None
    assert next_larger(TOPOLOGIES["v5p-4"]).name == "v5p-8"
    assert "--topology" not in remedies_of(gemma4_26b_a4b(), "v6e-256")
