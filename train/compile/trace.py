"""The training step as a StableHLO module for many chips, traced on one CPU device without data.

Parameters, moments and batch are placeholders: shapes with no memory behind them, so 26 B
parameters cost nothing. Every argument carries the layout of the real run, and each piece of state
is marked as sharing its buffer with the value that replaces it, so that the compiler's memory
figure is the true one. Backward passes count devices in 8 bits, which is why the 128 chips are a
mesh of numbers over one real device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor

from pallas_ops.bridge import Lowering, lowered
from torch_gemma4.model import Gemma4ForCausalLM
from train.build import build_execution, build_optimizer
from train.compile.scopes import Scopes
from train.mesh import MeshLayout
from train.micro_batches import MicroBatches
from train.sharding import ROW_AXES, Spec
from train.step import train_step

if TYPE_CHECKING:
    from train.config import MeshConfig, RunConfig


@dataclass(frozen=True)
class TracedStep:
    """A step ready for a compiler."""

    module: bytes
    """StableHLO as MLIR bytecode; arguments carry layouts and donation."""
    num_chips: int
    """Devices the program is for."""
    kernels: tuple[Lowering, ...]
    """JAX functions that it calls."""
    argument_names: dict[int, str]
    """By an argument's number: a parameter's name, "exp_avg/" and "exp_avg_sq/" before it for its
    moments, or an input of the batch. Scalars that the trace made are not in it."""


class NumberedMesh(xs.Mesh):
    """A mesh of device numbers, without asking the runtime for so many devices."""

    def __init__(self, config: MeshConfig) -> None:
        self.axis_names, self.mesh_shape = zip(*config.axes, strict=True)
        self.device_ids = np.arange(config.num_devices)


class Placeholders:
    """Makes the step's inputs and remembers them."""

    def __init__(self, layout: MeshLayout) -> None:
        self.layout = layout
        self.tensors: dict[str, Tensor] = {}
        self.specs: dict[str, Spec] = {}

    def make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, spec: Spec) -> Tensor:
        placeholder = xb.create_placeholder_tensor(tuple(shape), dtype)
        self.tensors[name], self.specs[name] = placeholder, spec
        # Not the placeholder itself: in-place updates and annotations would replace it.
        return self.layout.annotate(placeholder * 1, spec)


def trace_step(config: RunConfig) -> TracedStep:
    """Traces one training step of `config`. Call `train.launch.prepare_tracing` first."""
    xr.use_spmd()
    layout = MeshLayout(config.mesh, NumberedMesh(config.mesh), target="tpu")
    inputs = Placeholders(layout)

    scopes = Scopes()
    execution = build_execution(config, layout)
    if (recompute := execution.recompute) is not None:
        execution = replace(execution, recompute=lambda body: recompute(scopes.around(body)))
    with torch.device("meta"):
        model = Gemma4ForCausalLM(config.model, execution)
    for name, parameter in list(model.named_parameters()):
        spec = layout.parameter_spec(name, parameter)
        tensor = inputs.make(name, parameter.shape, torch.float32, spec)
        layout.adopt_parameter(model, name, tensor.detach())

    optimizer = build_optimizer(config, layout, model)
    for kind, moments in optimizer.moments.items():
        for name, zeros in moments.items():
            spec = layout.parameter_spec(name, zeros)
            moments[name] = inputs.make(f"{kind}/{name}", zeros.shape, zeros.dtype, spec)
    shape = (config.data.batch_size, config.data.sequence_length)
    batch = {
        name: inputs.make(name, shape, torch.int32, (ROW_AXES, None))
        for name in config.data.batch_arrays
    }
    micro_batches = MicroBatches(model, layout, config.accumulate)
    with scopes:
        metrics = train_step(micro_batches, optimizer, layout, batch)

    state = {name: parameter.detach() for name, parameter in optimizer.parameters.items()}
    for kind, moments in optimizer.moments.items():
        state |= {f"{kind}/{name}": tensor for name, tensor in moments.items()}
    return export_step(config, inputs, state, list(metrics.values()))


def export_step(
    config: RunConfig, inputs: Placeholders, state: dict[str, Tensor], others: list[Tensor]
) -> TracedStep:
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jax._src.lib.mlir import ir

    context = torch_xla._XLAC.lowering.LoweringContext("train_step")
    context.build([*state.values(), *others])
    positions = {name: context.tensor_parameter_id(t) for name, t in inputs.tensors.items()}
    positions = {name: position for name, position in positions.items() if position >= 0}
    with mlir.make_ir_context():
        module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(context.hlo()))
        (main,) = (f for f in module.body.operations if f.attributes["sym_name"].value == "main")
        arguments = [dict(_items(attributes)) for attributes in main.arg_attrs]
        for name, position in positions.items():
            text = _sharding_text(config, inputs.specs[name])
            arguments[position]["mhlo.sharding"] = ir.StringAttr.get(text)
        results = [{} for _ in main.type.results]
        int32 = ir.IntegerType.get_signless(32)
        for index, name in enumerate(state):
            text = _sharding_text(config, inputs.specs[name])
            results[index]["mhlo.sharding"] = ir.StringAttr.get(text)
            arguments[positions[name]]["tf.aliasing_output"] = ir.IntegerAttr.get(int32, index)
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in arguments])
        main.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(r) for r in results])
        bytecode = mlir.module_to_bytecode(module)
    names = {position: name for name, position in positions.items()}
    return TracedStep(bytecode, config.mesh.num_devices, lowered(), names)


def _items(attributes) -> list[tuple[str, object]]:
    return [(named.name, named.attr) for named in attributes]


def _sharding_text(config: RunConfig, spec: Spec) -> str:
    """A layout in HLO's own notation."""
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    axes, sizes = zip(*config.mesh.axes, strict=True)
    sharding = NamedSharding(AbstractMesh(sizes, axes), PartitionSpec(*spec))
    return str(sharding._to_xla_hlo_sharding(len(spec)))
