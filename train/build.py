"""From a config to a placed model: execution, parameters on the mesh, initial values."""

from __future__ import annotations

import functools
import itertools
import operator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
import torch_xla.core.xla_model as xm
from torch import Tensor

from torch_gemma4.execution import Execution, LayerLoop, Precision, python_loop
from torch_gemma4.init import initial_values
from torch_gemma4.model import Gemma4ForCausalLM
from torch_gemma4.recompute import recompute_layer
from train.muon import Muon
from train.optim import AdamW
from train.sharding import RULES
from train.xla_loop import XlaLoop

if TYPE_CHECKING:
    from train.config import RunConfig
    from train.mesh import DeviceMesh, MeshLayout


def build_execution(config: RunConfig, mesh: MeshLayout) -> Execution:
    """How the model runs on this mesh."""
    recompute = None
    if config.recompute != "none":
        barrier = xm.optimization_barrier_ if config.layers == "loop" else None
        recompute = functools.partial(recompute_layer, policy=config.recompute, barrier=barrier)
    return Execution(
        precision=Precision(
            compute=getattr(torch, config.precision.compute),
            reduce=getattr(torch, config.precision.reduce),
        ),
        sharding=mesh.op_sharding(config.model),
        attention=config.attention,
        dispatch=config.dispatch_in_force[0],
        fence_expert_gathers=config.fence_expert_gathers,
        loop=_loop(config, mesh),
        recompute=recompute,
        constrain=mesh.constrain,
    )


def _loop(config: RunConfig, mesh: MeshLayout) -> LayerLoop:
    if config.layers == "loop":
        return python_loop
    return XlaLoop(mesh.annotate_layer_gradient, offload=config.offload_activations)


def build_model(config: RunConfig, mesh: DeviceMesh) -> Gemma4ForCausalLM:
    """The model with its initial parameters, each on the mesh as its rule says; with
    `config.init_from` they are zeros, to be filled."""
    with torch.device("meta"):
        model = Gemma4ForCausalLM(config.model, build_execution(config, mesh))
    if config.init_from:
        for name, parameter in list(model.named_parameters()):
            mesh.adopt_parameter(model, name, sharded_zeros(mesh, name, parameter))
        return model
    values = initial_values(model, config.seed)
    # One parameter at a time: the host never holds the whole model.
    for name, layers in itertools.groupby(values, key=operator.itemgetter(0)):
        parameter = torch.empty(model.get_parameter(name).shape, dtype=torch.float32)
        for _, index, value in layers:
            parameter[index] = value
        mesh.place_parameter(model, name, parameter)
    return model


def decays(name: str) -> bool:
    """Whether weight decay applies to parameter `name`: to matrices, which are what the sharding
    rules split."""
    return any(rule.dims and fnmatchcase(name, rule.pattern) for rule in RULES)


def build_optimizer(config: RunConfig, mesh: MeshLayout, model: Gemma4ForCausalLM) -> AdamW:
    """The optimizer of `config.optim`, its state on the mesh as the parameters are."""
    arguments = (dict(model.named_parameters()), config.optim, config.steps)
    options = {"decays": decays, "zeros_like": functools.partial(sharded_zeros, mesh)}
    if config.optim.name == "adamw":
        return AdamW(*arguments, **options)
    dtype = getattr(torch, config.precision.compute)
    return Muon(*arguments, **options, dtype=dtype, whole=mesh.whole_matrices)


def sharded_zeros(mesh: MeshLayout, name: str, like: Tensor) -> Tensor:
    """Zeros that lie as parameter `name` does, made on the devices."""
    zeros = torch.zeros(like.shape, dtype=torch.float32, device=mesh.device)
    return mesh.annotate_parameter(name, zeros)
