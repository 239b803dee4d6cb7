"""The bridge: JAX functions as nodes of a lazy torch_xla graph, what it refuses, what it leaves."""

import base64
import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest
import torch
import torch_xla
from jaxlib.mlir import ir
from torch_xla.utils.checkpoint import checkpoint

from pallas_ops import OpSharding, bridge, gmm, tgmm
from pallas_ops.gmm import kernel
from pallas_ops.tgmm import kernel as tgmm_kernel
from torch_gemma4.recompute import recompute_layer


def scaled_sum(x, y, *, scale, interpret):
    return (scale * (x + y),)


def several(x, n, flags, *, interpret):
    """Results of other shapes and dtypes than the arguments'."""
    return x.T, n + 1, ~flags, jnp.where(flags, n, 0).astype(jnp.bfloat16)


def interpreted(x, *, interpret):
    return (jnp.full(x.shape, interpret),)


def failing(x, *, interpret):
    raise RuntimeError("as a kernel may")


def xla(*tensors):
    return [tensor.to("xla") for tensor in tensors]


def test_runs_inside_a_lazy_graph():
    x, y = torch.randn(2, 3, 4)
    a, b = xla(x, y)
    before, after = a * 2, b - 1
    (out,) = bridge.call(scaled_sum, [before, after], static={"scale": 3})
    out = torch.relu(out)
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([out])
    assert hlo.count("ENTRY") == 1  # nothing has run yet, and all of it is one program
    for operation in ("multiply(", "subtract(", "add(", "maximum("):
        assert operation in hlo
    torch.testing.assert_close(out.cpu(), torch.relu(3 * (2 * x + y - 1)))


def test_several_outputs_of_any_dtype():
    x = torch.randn(2, 3).bfloat16()
    n = torch.tensor([1, -2, 2**31 - 2], dtype=torch.int32)
    flags = torch.tensor([True, False, True])
    outputs = [out.cpu() for out in bridge.call(several, xla(x, n, flags))]
    expected = [x.T, n + 1, ~flags, torch.where(flags, n, 0).bfloat16()]
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)


def test_cpu_kernels_are_interpreted():
    assert bridge.runtime_target() == "cpu"
    assert bridge.call(interpreted, xla(torch.zeros(2)))[0].cpu().tolist() == [True, True]


def test_lowered_once_for_each_signature(monkeypatch):
    lowerings, lower = [], bridge.lower

    def counted(fn, signature, **options):
        lowerings.append(signature)
        return lower(fn, signature, **options)

    monkeypatch.setattr(bridge, "lower", counted)
    a, b = xla(torch.zeros(3, 17), torch.zeros(3, 17))
    half, longer = a.bfloat16(), torch.zeros(4, 17, device="xla")
    for _ in range(2):
        for x, y, scale in ((a, b, 1), (a, b, 2), (half, half, 1), (longer, longer, 1), (b, a, 1)):
            bridge.call(scaled_sum, [x, y], static={"scale": scale})
    assert len(lowerings) == 4
    assert lowerings[0] == (((3, 17), "float32"),) * 2


def test_one_computation_may_occur_twice_in_a_graph():
    x, y = torch.randn(2, 5)
    a, b = xla(x, y)
    (first,) = bridge.call(scaled_sum, [a, b], static={"scale": 3})
    (second,) = bridge.call(scaled_sum, [first, b], static={"scale": 3})
    torch.testing.assert_close(second.cpu(), 3 * (3 * (x + y) + y))


class Holder:
    def method(self, x, y, *, interpret):
        return (x + y,)


def not_module_level():
    scale = 2

    def closure(x, y, *, interpret):
        return (scale * (x + y),)

    def inner(x, y, *, interpret):
        return (x + y,)

    return {
        "closure": closure,
        "inner function": inner,
        "lambda": lambda x, y, interpret: (x + y,),
        "partial": functools.partial(scaled_sum, scale=2),
        "method": Holder().method,
    }


@pytest.mark.parametrize("case", not_module_level())
def test_functions_of_a_moment_are_refused(case):
    function = not_module_level()[case]
    with pytest.raises(ValueError, match="must be a module-level function") as error:
        bridge.call(function, xla(torch.zeros(2), torch.zeros(2)))
    assert repr(function) in str(error.value)


ZEROS = torch.zeros(2, 3)
BAD = {
    "cpu": (ZEROS, {}, r"scaled_sum: tensor 1 \(2, 3\) is on cpu, expected an XLA device; move"),
    "int64": (ZEROS.long().to("xla"), {}, r"tensor 1 \(2, 3\) has dtype torch.int64, which"),
    "float64": (ZEROS.double().to("xla"), {}, r"tensor 1 \(2, 3\) has dtype torch.float64, which"),
    "complex": (ZEROS.cfloat().to("xla"), {}, r"has dtype torch.complex64, .*cast it to one of"),
    "static": (ZEROS.to("xla"), {"scale": [1]}, r"static argument scale=\[1\] must be hashable"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case):
    tensor, static, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        bridge.call(scaled_sum, [ZEROS.to("xla"), tensor], static={"scale": 1} | static)


def test_dtype_names():
    assert bridge.jax_dtype(torch.bfloat16) == "bfloat16"
    with pytest.raises(ValueError, match=r"torch.float64 has no TPU kernel; use one of"):
        bridge.jax_dtype(torch.float64)
    rows, sizes = xla(torch.zeros(4, 2), torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"torch.float64 has no TPU kernel"):
        tgmm(rows, rows, sizes, out_dtype=torch.float64)


GMM_SIGNATURE = (((64, 128), "bfloat16"), ((4, 128, 256), "bfloat16"), ((4,), "int32"))


def mosaic_module(text):
    """The kernel inside lowered text: its target and its Mosaic module."""
    (config,) = re.findall(r'@tpu_custom_call.*?backend_config = "((?:[^"\\]|\\.)*)"', text)
    # MLIR writes bytes it escapes as two hexadecimal digits.
    config = re.sub(r"\\([0-9A-F]{2})", lambda digits: chr(int(digits[1], 16)), config)
    body = base64.b64decode(json.loads(config)["custom_call_config"]["body"])
    context = ir.Context()
    context.allow_unregistered_dialects = True
    return ir.Module.parse(body, context=context)


def test_tpu_kernels_are_in_the_format_that_libtpu_reads():
    static = {"transpose_rhs": False}
    lowered = bridge.lower(kernel.gmm, GMM_SIGNATURE, static=static, target="tpu")
    attributes = mosaic_module(lowered.as_text()).operation.attributes
    # libtpu 0.0.21 reads up to 7, jax 0.7.1 writes 8 unless it exports: pytorch/xla 9614.
    assert ir.IntegerAttr(attributes["stable_mosaic.version"]).value <= 7
    # test_v6e_compile.py has it read.


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", ["gmm", "tgmm"])
def test_only_fp32_operands_are_multiplied_in_fp32(op, dtype):
    # The default on a TPU is one bf16 pass, whatever the operands' dtype.
    fn, rhs, static = {
        "gmm": (kernel.gmm, (4, 128, 256), {"transpose_rhs": False}),
        "tgmm": (tgmm_kernel.tgmm, (64, 256), {"out_dtype": "float32"}),
    }[op]
    signature = (((64, 128), dtype), (rhs, dtype), ((4,), "int32"))
    text = str(mosaic_module(bridge.lower(fn, signature, static=static, target="tpu").as_text()))
    assert text.count("tpu.matmul") == 1
    assert ("contract_precision<fp32>" in text) == (dtype == "float32")


def test_cpu_lowering_has_no_custom_call():
    static = {"transpose_rhs": False}
    lowered = bridge.lower(kernel.gmm, GMM_SIGNATURE, static=static, target="cpu")
    assert "tpu_custom_call" not in lowered.as_text()


def test_sharded_lowering_has_local_shapes():
    layout = OpSharding(mesh=(("fsdp", 4),), row_axes=("fsdp",))
    rows = layout.row_spec(2)
    lowered = bridge.lower(
        kernel.gmm_sharded,
        (*GMM_SIGNATURE[:2], ((4, 4), "int32")),
        static={"transpose_rhs": False, "weight_axis": "fsdp", "weight_dim": 0},
        sharding=layout,
        in_specs=(rows, layout.weight_spec, rows),
        out_specs=(rows,),
        target="tpu",
    )
    (call,) = re.findall(r"@tpu_custom_call.*", lowered.as_text())
    assert "-> tensor<16x256xbf16>" in call  # a quarter of the rows
    assert "tensor<4x128x256xbf16>" in call  # every group's matrix, gathered


@pytest.mark.parametrize("target", ["cpu", "tpu"])
def test_jax_configuration_is_left_as_it_was(target):
    option, before = "jax_use_shardy_partitioner", jax.config.jax_use_shardy_partitioner
    for value in (True, False):
        jax.config.update(option, value)
        try:
            bridge.lower(interpreted, [((2,), "float32")], target=target)
            assert jax.config.jax_use_shardy_partitioner is value
            with pytest.raises(RuntimeError, match="as a kernel may"):
                bridge.lower(failing, [((2,), "float32")], target=target)
            assert jax.config.jax_use_shardy_partitioner is value
        finally:
            jax.config.update(option, before)


def layer(x, params, constants):
    hidden = torch.tanh(gmm(x, params["w"], constants[0]))
    return gmm(hidden, params["w"], constants[0], transpose_rhs=True), ()


def plain_layer(x, w, sizes):
    return layer(x, {"w": w}, (sizes,))[0]


def repeated(x, w, sizes):
    return plain_layer(plain_layer(x, w, sizes), w, sizes)


def checkpointed(x, w, sizes):
    return checkpoint(plain_layer, checkpoint(plain_layer, x, w, sizes), w, sizes)


def recomputed(x, w, sizes):
    body = recompute_layer(layer)
    return body(body(x, {"w": w}, (sizes,))[0], {"w": w}, (sizes,))[0]


@pytest.mark.parametrize("variant", [repeated, checkpointed, recomputed])
def test_gradients_through_repetition_and_recomputation(variant):
    x, w = torch.randn(24, 6), torch.randn(3, 6, 5) / 2
    sizes = torch.tensor([10, 0, 9], dtype=torch.int32)
    dout = torch.randn(24, 6)

    def gradients(function, *tensors, dout):
        x, w, sizes = tensors
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        out = function(x, w, sizes)
        out.backward(dout)
        return [t.detach().cpu() for t in (out, x.grad, w.grad)]

    expected = gradients(repeated, x, w, sizes, dout=dout)
    result = gradients(variant, *xla(x, w, sizes), dout=dout.to("xla"))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert not result[2][1].count_nonzero()


def test_what_is_lowered_is_listed_once():
    x = torch.ones(2, 3)
    before = bridge.lowered()
    for _ in range(2):
        bridge.call(scaled_sum, xla(x, x), static={"scale": 71})
    (new,) = [lowering for lowering in bridge.lowered() if lowering not in before]
    assert (new.fn, new.static, new.target) == (scaled_sum, (("scale", 71),), "cpu")
    assert new.local_signature == new.signature == (((2, 3), "float32"),) * 2


def test_shapes_on_one_device_follow_the_specs():
    lowering = bridge.Lowering(
        fn=scaled_sum,
        static=(),
        signature=(((8, 6), "float32"), ((4,), "int32")),
        sharding=OpSharding(mesh=(("data", 2), ("fsdp", 4)), row_axes=("data", "fsdp")),
        specs=(((("data", "fsdp"), None), ("data",)), ()),
        target="tpu",
    )
    assert lowering.local_signature == (((1, 6), "float32"), ((2,), "int32"))
