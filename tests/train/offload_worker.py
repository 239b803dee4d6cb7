"""Compiles loops within a loop, and their backward pass, for one v6e chip, with what they keep in
HBM and on the host: one JSON object {"hbm", "host"} of bytes of temporaries each."""

import json

import torch

from train.launch import prepare_compiler, prepare_tracing

PERIODS, LAYERS, ROWS, WIDTH = 4, 3, 32_768, 256


def layer(x, params, constants):
    hidden = torch.nn.functional.gelu(x @ params["up"])
    return x + hidden @ params["down"], (hidden.float().mean(),)


def step(offload):
    """Gradients of PERIODS times LAYERS layers in an inner loop and one more beside it."""
    import torch_xla.core.xla_builder as xb

    from torch_gemma4.recompute import recompute_layer
    from train.xla_loop import XlaLoop

    loop, body = XlaLoop(offload=offload), recompute_layer(layer)

    def period(x, params, constants):
        inner = {name: params[f"{name}s"] for name in ("up", "down")}
        x, (means,) = loop(body, x, inner, constants)
        x, (mean,) = body(x, {name: params[name] for name in inner}, constants)
        return x, (torch.cat([means, mean[None]]),)

    def placeholder(*shape):
        return (xb.create_placeholder_tensor(shape, torch.bfloat16) * 1).detach().requires_grad_()

    params = {
        "ups": placeholder(PERIODS, LAYERS, WIDTH, WIDTH),
        "downs": placeholder(PERIODS, LAYERS, WIDTH, WIDTH),
        "up": placeholder(PERIODS, WIDTH, WIDTH),
        "down": placeholder(PERIODS, WIDTH, WIDTH),
    }
    y, _ = loop(period, placeholder(ROWS, WIDTH), params, ())
    y.float().square().mean().backward()
    return [param.grad for param in params.values()]


def compile_step(gradients):
    import torch_xla
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jax._src.lib.mlir import ir

    from pallas_ops.compile_only import compile_module, topology_devices

    context = torch_xla._XLAC.lowering.LoweringContext("step")
    context.build(gradients)
    with mlir.make_ir_context():
        module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(context.hlo()))
        bytecode = mlir.module_to_bytecode(module)
    stats = compile_module(bytecode, topology_devices("v6e:1x1", (1, 1, 1)))
    stats = stats.get_compiled_memory_stats()
    return {"hbm": stats.temp_size_in_bytes, "host": stats.host_temp_size_in_bytes}


if __name__ == "__main__":
    prepare_compiler("v6e")
    prepare_tracing()
    print(json.dumps([compile_step(step(offload)) for offload in (False, True)]))
