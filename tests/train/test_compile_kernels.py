"""Pallas calls of a compiled step and their schedules; nothing is compiled here."""

from dataclasses import replace

import pytest

from pallas_ops.bridge import Lowering
from pallas_ops.gmm import kernel as gmm_kernel
from pallas_ops.sharding import OpSharding
from pallas_ops.tiling import Tiles
from train.compile import hlo, kernels
from train.compile.static.profile import CallProfile, known_steps
from train.compile.static.step_time import StepTime

MESH = OpSharding(mesh=(("fsdp", 2),), row_axes=("fsdp",), target="tpu")
GMM = Lowering(
    fn=gmm_kernel.gmm,
    static=(("tiles", Tiles(128, 128, 128)), ("transpose_rhs", False)),
    signature=(((512, 128), "bfloat16"), ((4, 128, 256), "bfloat16"), ((8,), "int32")),
    sharding=MESH,
    specs=((("fsdp", None), (None, None, None), ("fsdp",)), (("fsdp", None),)),
    target="tpu",
)


def program(results, operands):
    lines = [f"  %p{i} = {shape} parameter({i})" for i, shape in enumerate(operands)]
    names = ", ".join(f"%p{i}" for i in range(len(operands)))
    call = f'  ROOT %k.7 = {results} custom-call({names}), custom_call_target="tpu_custom_call"'
    return hlo.Program("\n".join(["HloModule m", "", "ENTRY %main () -> x {", *lines, call, "}"]))


def known():
    ((key, (call,)),) = kernels.known_calls([GMM, GMM]).items()
    return key, call


def test_a_lowering_is_known_by_its_shapes_on_one_device():
    assert GMM.local_signature == (
        ((256, 128), "bfloat16"), ((4, 128, 256), "bfloat16"), ((4,), "int32"),
    )  # fmt: skip
    key, call = known()
    assert call.name == "gmm" and key[1] == (("bf16", (256, 256)),)
    assert key[0][-2:] == (("bf16", (256, 128)), ("bf16", (4, 128, 256)))


def fake_profile(call, flags=()):
    time = StepTime(total=2e-3, compute=1e-3, dma=2e-3, num_dma_bound=1)
    return CallProfile(None, None, "", time, 1.0)


def text(key_part):
    return [f"{dtype}[{','.join(map(str, dims))}]{{0:T(8,128)}}" for dtype, dims in key_part]


def test_a_call_of_the_program_gets_the_schedule_of_its_shapes(monkeypatch):
    monkeypatch.setattr(kernels, "profile_call", fake_profile)
    key, _ = known()
    compiled = program(text(key[1])[0], text(key[0]))
    (found,) = kernels.schedules(compiled, [GMM])
    assert (found.name, found.key, found.seconds, found.unknown) == ("gmm", key, 2e-3, "")
    assert found.source == "static schedule at random routing"


def test_kernels_that_shapes_do_not_tell_apart_are_said(monkeypatch):
    monkeypatch.setattr(kernels, "profile_call", fake_profile)
    static = (("tiles", Tiles(128, 128, 128)), ("transpose_rhs", True))
    square = (*GMM.signature[:1], ((4, 128, 128), "bfloat16"), *GMM.signature[2:])
    one, other = (replace(GMM, signature=square, static=each) for each in (GMM.static, static))
    ((key, calls),) = kernels.known_calls([one, other]).items()
    assert len(calls) == 2
    (found,) = kernels.schedules(program(text(key[1])[0], text(key[0])), [one, other])
    assert found.seconds == 2e-3 and found.unknown == "of one of 2 kernels with these shapes"
    assert found.source == f"static schedule at random routing, {found.unknown}"


def test_a_call_that_is_not_ours_has_no_schedule():
    (found,) = kernels.schedules(program("f32[8]{0}", ["f32[8]{0}"]), [GMM])
    assert found.seconds is None and found.name == "k.7"
    assert found.unknown == "no function of this project made it"
    assert found.source == f"bound by bytes and FLOPs ({found.unknown})"


@pytest.mark.parametrize("error", [ValueError("its loops\nand more"), RuntimeError("its loops")])
def test_a_call_whose_schedule_cannot_be_had_says_why(monkeypatch, error):
    def refuse(call, flags=()):
        raise error

    monkeypatch.setattr(kernels, "profile_call", refuse)
    key, _ = known()
    (found,) = kernels.schedules(program(text(key[1])[0], text(key[0])), [GMM])
    assert found.seconds is None and found.unknown == "its loops"


def test_a_kernel_that_copies_by_itself_is_modelled_at_random_routing():
    """gmm's matrices are its own copies, and its steps those of the groups."""
    _, call = known()
    steps = known_steps(call)
    # In two parts of 128 columns.
    assert steps.num_own_rows == 2 * 256 and steps.opens.sum() == 2 * 4


def test_what_is_lowered_for_a_cpu_is_no_tpu_kernel():
    assert kernels.known_calls([replace(GMM, target="cpu")]) == {}
