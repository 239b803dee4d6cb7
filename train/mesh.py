"""The device mesh: `MeshLayout` states how values lie on it, `DeviceMesh` also puts them there.

One process a host owns all its devices; the mesh spans all hosts. Device order is the runtime's, 0,
1, 2, ..., which is also what the kernels' shard_map assumes. The runtime numbers one slice after
the other, so that the data axis, the outer one, is what goes between slices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import Tensor, nn

from pallas_ops import OpSharding
from pallas_ops.sharding import Target
from train.data.batches import HostRows
from train.sharding import (
    ROW_AXES,
    WEIGHT_AXIS,
    Spec,
    expert_weight_dim,
    parameter_spec,
    rule_of,
)

if TYPE_CHECKING:
    from torch_gemma4.config import Gemma4Config
    from train.config import MeshConfig


class MeshLayout:
    """A mesh by name and number, and the layout of every value on it. The devices need not be here:
    ahead-of-time compilation states the layouts of 128 chips on a host with none."""

    def __init__(self, config: MeshConfig, xla_mesh: xs.Mesh, target: Target | None = None) -> None:
        """`target` is what kernels are lowered for, by default what the runtime runs on."""
        self.config, self.xla_mesh, self.target = config, xla_mesh, target
        self.device = torch_xla.device()
        # Float32 products (the router's) are float32 on a TPU too; bfloat16 ones cost no more.
        # (torch_xla.backends has this function, but always warns that it was called.)
        torch_xla._XLAC._xla_set_mat_mul_precision("highest")

    @property
    def num_row_shards(self) -> int:
        """Pieces that the batch is cut into."""
        return self.config.num_devices

    def op_sharding(self, model: Gemma4Config) -> OpSharding:
        """The layout that the model's kernels run with."""
        return OpSharding(
            mesh=self.config.axes,
            row_axes=ROW_AXES,
            weight_axis=WEIGHT_AXIS,
            weight_dim=expert_weight_dim(model, self.config.fsdp)
            if model.enable_moe_block
            else None,
            target=self.target,
        )

    def annotate(self, tensor: Tensor, spec: Spec) -> Tensor:
        """States, in place, how a value of the lazy graph lies; returns it."""
        torch_xla._XLAC._xla_annotate_custom_sharding(tensor, self.xla_mesh.get_op_sharding(spec))
        return tensor

    def annotate_parameter(self, name: str, tensor: Tensor) -> Tensor:
        """States that a value shaped as parameter `name`, or as one layer of it, lies as it is
        stored."""
        return self.annotate(tensor, self.parameter_spec(name, tensor))

    def whole_matrices(self, name: str, parameter: Tensor) -> Callable[[Tensor], Tensor]:
        """States that matrices stacked as parameter `name` [..., n, rows, columns], but with n
        first, lie as it along the stack, with rows and columns whole."""
        *others, last = self.parameter_spec(name, parameter)[:-2]
        spec = (last, *others, None, None)
        return lambda matrices: self.annotate(matrices, spec)

    def annotate_layer_gradient(self, name: str, grad: Tensor) -> Tensor:
        """The same inside a layer loop, where what all devices share has a copy for each row shard
        [..., n, D] (torch_gemma4/scales.py), whose gradients stay apart."""
        if rule_of(name).dims or self.num_row_shards == 1:
            return self.annotate_parameter(name, grad)
        return self.annotate(grad, self._copies_spec(grad))

    def _copies_spec(self, tensor: Tensor) -> Spec:
        return (*[None] * (tensor.ndim - 2), ROW_AXES, None)

    def parameter_spec(self, name: str, tensor: Tensor) -> Spec:
        """The stored layout of parameter `name`."""
        return parameter_spec(name, tuple(tensor.shape), self.config.fsdp)

    def constrain(self, tensor: Tensor, role: str) -> Tensor:
        """The model's layout hook (`Execution.constrain`): activations split by rows, forward and
        backward; tables and weights whole on every device, hence gathered in the compute dtype; a
        table's gradient as the table is stored, hence reduced straight to shards; copies of scales
        beside the rows that read them."""
        if role == "copies":
            return _Constrain.apply(tensor, self, self._copies_spec(tensor))
        if role == "table_gradient":
            return _Constrain.apply(tensor, self, self.parameter_spec("embedding.weight", tensor))
        if role in ("table", "weight"):
            return _Constrain.apply(tensor, self, (None,) * tensor.ndim)
        return _Constrain.apply(tensor, self, (ROW_AXES, *[None] * (tensor.ndim - 1)))

    def adopt_parameter(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        """Makes `tensor`, which lies as it should, parameter `name` of `module`, and has its
        gradient lie so too: left alone, the partitioner may replicate that."""
        owner, _, own_name = name.rpartition(".")
        requires_grad = module.get_parameter(name).requires_grad
        parameter = nn.Parameter(tensor, requires_grad=requires_grad)
        if requires_grad:
            pin = functools.partial(self._annotate_gradient, name)
            parameter.register_post_accumulate_grad_hook(pin)
        setattr(module.get_submodule(owner), own_name, parameter)

    def _annotate_gradient(self, name: str, parameter: nn.Parameter) -> None:
        self.annotate_parameter(name, parameter.grad)


class DeviceMesh(MeshLayout):
    """The mesh of a run, on this process's runtime. Call `train.launch.prepare_environment` first.

    Raises ValueError if the runtime has another number of devices than the config's mesh, or if the
    fsdp axis would span slices.
    """

    def __init__(self, config: MeshConfig) -> None:
        xr.use_spmd()
        # Also starts the client: the autograd engine sizes its queues by the client's devices at
        # the process's first backward.
        available = xr.global_runtime_device_count()
        if available != config.num_devices:
            raise ValueError(
                f"mesh.data * mesh.fsdp = {config.data} * {config.fsdp} = {config.num_devices}, "
                f"but the {xr.device_type()} runtime has {available} devices: make them equal"
            )
        refuse_weights_between_slices(config, _slices())
        axes, sizes = zip(*config.axes, strict=True)
        super().__init__(config, xs.Mesh(np.arange(available), sizes, axes))

    @property
    def host_rows(self) -> HostRows:
        """The parts of a batch that this process's devices take."""
        names = torch_xla._XLAC._xla_get_runtime_devices()  # of this process, such as TPU:5
        parts = tuple(int(name.rpartition(":")[2]) for name in names)
        return HostRows(parts, self.num_row_shards)

    def place(self, tensor: Tensor, spec: Spec) -> Tensor:
        """A CPU tensor as an XLA tensor that lies as `spec` says; only shards travel."""
        sharding = xs.ShardingSpec(self.xla_mesh, spec)
        return xm.send_cpu_data_to_device([tensor.contiguous()], self.device, sharding)[0]

    def place_whole(self, tensor: Tensor) -> Tensor:
        """A CPU tensor, whole on every device."""
        return self.place(tensor, (None,) * tensor.ndim)

    def place_batch(self, batch: dict[str, np.ndarray]) -> dict[str, Tensor]:
        """Arrays [B, ...] as XLA tensors split by rows. Only this host's rows are looked at."""
        return {
            name: self.place(torch.from_numpy(array), (ROW_AXES, *[None] * (array.ndim - 1)))
            for name, array in batch.items()
        }

    def place_parameter(self, module: nn.Module, name: str, value: Tensor) -> None:
        """Puts a CPU tensor onto the mesh as parameter `name` of `module`, as its rule says."""
        self.adopt_parameter(module, name, self.place(value, self.parameter_spec(name, value)))


def refuse_weights_between_slices(config: MeshConfig, slices: Sequence[int]) -> None:
    """Raises ValueError unless devices that share weights, runs of mesh.fsdp of them, are in one
    slice. `slices` has the slice of each device."""
    if all(len(set(run)) == 1 for run in np.reshape(slices, (config.data, config.fsdp))):
        return
    count = len(set(slices))
    raise ValueError(
        f"mesh.data * mesh.fsdp = {config.data} * {config.fsdp}: weights would be gathered between "
        f"the {count} slices, over the data-centre network; give --mesh.data {count} "
        f"--mesh.fsdp {len(slices) // count}"
    )


def _slices() -> list[int]:
    """The slice of each device, in the runtime's order."""
    attributes = xr.global_runtime_device_attributes()
    by_number = {
        int(one["name"].rpartition(":")[2]): one.get("slice_index", 0) for one in attributes
    }
    return [by_number[number] for number in sorted(by_number)]


class _Constrain(torch.autograd.Function):
    """Annotates a value and its gradient with one layout."""

    @staticmethod
    def forward(ctx, tensor, mesh, spec):
        ctx.mesh, ctx.spec = mesh, spec
        # Not the argument itself: an annotation on a graph input would replace the input.
        return mesh.annotate(tensor * 1, spec)

    @staticmethod
    def backward(ctx, grad):
        return ctx.mesh.annotate(grad * 1, ctx.spec), None, None
