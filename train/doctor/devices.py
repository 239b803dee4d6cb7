"""The devices, one kernel on them, and two steps of a tiny training run.

python -m train.doctor.devices '{"platform": "cpu", "fsdp": 4, "data": 1}'
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from train.config import DataConfig, MeshConfig, OptimConfig, PrecisionConfig, RunConfig
from train.doctor.children import print_findings
from train.doctor.finding import Finding
from train.launch import prepare_environment, refuse_without_chips
from train.presets import cpu_tiny

if TYPE_CHECKING:
    from torch import Tensor

    from train.mesh import DeviceMesh

DEVICES, KERNEL, STEP = CHECKS = ("devices", "a kernel", "training steps")
_KERNEL_TOLERANCE = 0.01
"""Of the largest value: bf16 keeps 8 bits, so two right results differ by 0.004 at most."""
_LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""Between the mesh and plain torch on this host, by compute dtype."""


def check_devices(config: MeshConfig) -> Iterator[Finding]:
    """DEVICES, KERNEL and STEP on the mesh of `config`."""
    try:
        if config.platform == "tpu":
            refuse_without_chips()
        prepare_environment(config)
        from train.mesh import DeviceMesh

        mesh = DeviceMesh(config)
    except ValueError as error:
        what, _, remedy = str(error).partition(": ")
        yield Finding(DEVICES, "failed", what, remedy or what)
        return
    yield Finding(DEVICES, "ok", _device_text(config))
    yield check_kernel()
    yield check_steps(mesh)


def check_kernel(product: Callable[..., Tensor] | None = None) -> Finding:
    """gmm in bf16 on the device beside its plain-torch reference on this host. `product` is
    pallas_ops.gmm, or a wrong one."""
    import torch
    import torch_xla

    from pallas_ops import gmm

    generator = torch.Generator().manual_seed(0)
    lhs = torch.randn(256, 256, generator=generator).bfloat16()
    rhs = torch.randn(4, 256, 128, generator=generator).bfloat16()
    sizes = torch.tensor([100, 0, 90, 50], dtype=torch.int32)  # ragged, empty, and a rest
    expected = gmm(lhs, rhs, sizes).float()
    device = torch_xla.device()
    operands = [tensor.to(device) for tensor in (lhs, rhs, sizes)]
    found = (product or gmm)(*operands).cpu().float()
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    if not error <= _KERNEL_TOLERANCE:  # NaN too
        return Finding(
            *(KERNEL, "failed", f"gmm differs from its reference by {error:.2%} of the largest"),
            cure="do not train on this host. On a TPU: try another host, and install the pinned "
            "set (pip install -e '.[tpu]'); if it stays so, report it with the versions above",
        )
    return Finding(KERNEL, "ok", f"gmm agrees with its reference within {error:.2%}")


def check_steps(mesh: DeviceMesh) -> Finding:
    """Two training steps of a small model on one batch: forward, backward, clip and update."""
    from train.build import build_model, build_optimizer
    from train.step import make_train_step

    config = small_run(mesh.config)
    model = build_model(config, mesh)
    step = make_train_step(model, build_optimizer(config, mesh, model), mesh)
    shape = (config.data.batch_size, config.data.sequence_length)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int32)
    batch = {"input_ids": tokens, "labels": tokens, "segment_ids": np.ones(shape, np.int32)}
    losses = [step(mesh.place_batch(batch))["cross_entropy"].item() for _ in range(config.steps)]
    tolerance = _LOSS_TOLERANCE[config.precision.compute]
    return judge_losses(losses, _plain_loss(config, batch), tolerance)


def judge_losses(losses: list[float], expected: float, tolerance: float) -> Finding:
    """Losses of steps on the same batch: the first is before any update and as `expected`, the
    last is lower."""
    text = f"loss {' then '.join(f'{loss:.4f}' for loss in losses)}; plain torch begins with "
    text += f"{expected:.4f}"
    agrees = abs(losses[0] - expected) <= tolerance  # NaN does not
    if agrees and losses[-1] < losses[0]:
        return Finding(STEP, "ok", text)
    what = "fall" if agrees else "begin as plain torch does"
    return Finding(
        *(STEP, "failed", text),
        cure=f"the loss does not {what}: do not train on this host. Compare with "
        "python -m train doctor --mesh.platform cpu --mesh.fsdp 1, and report both",
    )


def _plain_loss(config: RunConfig, batch: dict[str, np.ndarray]) -> float:
    """Of the same untrained model in plain torch on this host."""
    import torch

    from torch_gemma4.execution import Execution, Precision
    from torch_gemma4.init import initial_values
    from torch_gemma4.model import Gemma4ForCausalLM

    compute = getattr(torch, config.precision.compute)
    model = Gemma4ForCausalLM(config.model, Execution(precision=Precision(compute=compute)))
    with torch.no_grad():
        for name, index, value in initial_values(model, config.seed):
            model.get_parameter(name)[index] = value
        output = model.loss(**{name: torch.from_numpy(array) for name, array in batch.items()})
    return output.cross_entropy.item()


def small_run(mesh: MeshConfig) -> RunConfig:
    """cpu_tiny cut down to one layer, in sizes that `mesh` divides; on a TPU with the kernels that
    large runs take, in sizes that these take."""
    config = cpu_tiny()
    is_tpu = mesh.platform == "tpu"
    model = replace(
        config.model,
        vocab_size=256 * mesh.fsdp // math.gcd(256, mesh.fsdp),
        hidden_size=128 * mesh.fsdp // math.gcd(128, mesh.fsdp),
        num_hidden_layers=1,
        layer_types=config.model.layer_types[-1:],
        num_experts=4,
        **({"head_dim": 128, "global_head_dim": 256} if is_tpu else {}),
    )
    return replace(
        config,
        model=model,
        mesh=mesh,
        steps=2,
        attention="kernel" if is_tpu else "einsum",
        precision=PrecisionConfig(compute="bfloat16" if is_tpu else "float32"),
        data=DataConfig(source="synthetic", sequence_length=128, batch_size=mesh.num_devices),
        optim=OptimConfig(learning_rate=1e-3, warmup_steps=1, schedule="constant"),
    )


def _device_text(config: MeshConfig) -> str:
    import torch_xla.runtime as xr

    text = f"{config.num_devices} {config.platform}, {xr.process_count()} host(s)"
    slices = {one.get("slice_index", 0) for one in xr.global_runtime_device_attributes()}
    return f"{text}, {len(slices)} slice(s)" if config.platform == "tpu" else text


if __name__ == "__main__":
    print_findings(check_devices(MeshConfig(**json.loads(sys.argv[1]))))
