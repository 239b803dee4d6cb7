"""Compiles loops within a loop and their backward pass for one v6e chip, without and with what they
keep on the host, then a training step of two micro-batches for eight with it: one JSON list of
{"hbm", "host"}, bytes of temporaries."""

import json
from dataclasses import replace

import torch

from tests.train.processes import bytecode
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


def two_periods(topology):
    """A run of two periods of layers, two micro-batches of 256 tokens a chip."""
    from train import presets
    from train.compile.command import on_topology

    config = presets.cpu_tiny()
    types = config.model.layer_types * 2
    return on_topology(
        replace(
            config,
            model=replace(config.model, num_hidden_layers=len(types), layer_types=types),
            mesh=replace(config.mesh, platform="tpu"),
            data=replace(config.data, batch_size=32),
            recompute="full",
            offload_activations=True,
            accumulate=2,
        ),
        topology,
    )


def sizes(module, topology):
    from pallas_ops.compile_only import compile_module, topology_devices

    devices = topology_devices(topology.libtpu_name, topology.host_grid)
    stats = compile_module(module, devices).get_compiled_memory_stats()
    return {"hbm": stats.temp_size_in_bytes, "host": stats.host_temp_size_in_bytes}


if __name__ == "__main__":
    prepare_compiler("v6e")
    prepare_tracing()
    from train.compile.topology import find_topology
    from train.compile.trace import trace_step

    chip, slice_ = find_topology("v6e-1"), find_topology("v6e-8")
    found = [sizes(bytecode("step", step(offload)), chip) for offload in (False, True)]
    print(json.dumps([*found, sizes(trace_step(two_periods(slice_)).module, slice_)]))
