"""Expert weights whole, in two halves, and whole behind a fence, compiled for a slice. No TPU.

    python -m benchmarks.expert_layouts      into benchmarks/results/expert_layouts_v6e-128.json

Router and experts of one 26B layer, forward and backward, without what stands beside them in the
step and without recomputation. What differs is when the compiler gathers the weights: a gather that
is not asynchronous is waited for where it stands. Rows tell each collective in the order of the
schedule.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from train import presets
from train.compile.command import on_topology
from train.compile.topology import find_topology
from train.launch import prepare_compiler, prepare_tracing

LAYOUTS: dict[str, dict[str, bool]] = {
    "whole": {},
    "two halves": {"split": True},
    "whole, router behind the gathers": {"fence": True},
}


@dataclass(frozen=True)
class Options:
    """Compare layouts of expert weights by when the compiler gathers them."""

    topology: str = "v6e-128"
    """Slice that the weights are split over."""
    out: Path | None = None
    """File of the rows; benchmarks/results/expert_layouts_TOPOLOGY.json if left out."""


def compile_layout(topology_name: str, *, split: bool = False, fence: bool = False) -> Any:
    """The compiled router and experts of one layer, forward and backward."""
    import torch
    import torch_xla.runtime as xr

    from torch_gemma4.moe import Experts
    from torch_gemma4.router import Router
    from train.build import build_execution
    from train.compile import trace
    from train.compile.compiler import compile_step
    from train.mesh import MeshLayout
    from train.sharding import ROW_AXES

    topology, config = find_topology(topology_name), presets.gemma4_26b_a4b()
    model = replace(config.model, split_expert_weights=split)
    config = on_topology(replace(config, fence_expert_gathers=fence, model=model), topology)
    xr.use_spmd()
    layout = MeshLayout(config.mesh, trace.NumberedMesh(config.mesh), target="tpu")
    execution, inputs = build_execution(config, layout), trace.Placeholders(layout)

    class Branch(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = (model.hidden_size, model.num_experts, model.top_k_experts)
            self.router, self.experts = Router(*sizes, execution), Experts(model, execution)

        def forward(self, x):
            scaled = x.float() * self.router.input_scale(torch.float32)
            routing = self.router(self.experts.fence(scaled, x.dtype))
            return self.experts(x, routing.expert_ids, routing.weights)

    with torch.device("meta"):
        branch = Branch()
    for name, parameter in list(branch.named_parameters()):
        spec = layout.parameter_spec(name, parameter)
        made = inputs.make(name, parameter.shape, torch.float32, spec)
        layout.adopt_parameter(branch, name, made.detach())
    tokens = config.data.batch_size * config.data.sequence_length
    rows = (tokens, model.hidden_size), torch.bfloat16, (ROW_AXES, None)
    x = inputs.make("x", *rows).detach().requires_grad_()
    y = branch(x)
    y.backward(inputs.make("dy", *rows))
    gradients = {name: parameter.grad for name, parameter in branch.named_parameters()}
    return compile_step(trace.export_step(config, inputs, gradients | {"x": x.grad}, [y]), topology)


def collectives_of(program: Any) -> list[dict[str, Any]]:
    """Those of a megabyte and more, in the order of the schedule."""
    from train.compile import collectives, hlo

    return [
        {"kind": each.kind, "bytes": each.bytes, "asynchronous": each.is_asynchronous}
        for _, each in collectives.executed(hlo.Program(program.hlo))
        if each.bytes >= 1 << 20 and each.kind != "collective-permute"
    ]


def waited_gather_bytes(collectives: list[dict[str, Any]]) -> int:
    """Bytes of all-gathers that nothing hides."""
    return sum(
        each["bytes"]
        for each in collectives
        if each["kind"] == "all-gather" and not each["asynchronous"]
    )


def main(options: Options) -> None:
    """Compile each, write, print."""
    prepare_compiler(find_topology(options.topology).chip.name)
    prepare_tracing()
    from benchmarks.kernel_profile import provenance

    rows = []
    for layout, choice in LAYOUTS.items():
        program = compile_layout(options.topology, **choice)
        collectives = collectives_of(program)
        waited = waited_gather_bytes(collectives)
        print(f"{layout}: gathers waited for {waited:,} bytes, peak {program.peak_bytes:,} bytes")
        row = {"weights": layout, "topology": options.topology, "collectives": collectives}
        row |= {"waited_gather_bytes": waited, "peak_bytes": program.peak_bytes}
        rows.append(row | {"compile_s": round(program.compile_s, 1)})
    made = provenance("benchmarks.expert_layouts")
    results = Path(__file__).parent / "results"
    out = options.out or results / f"expert_layouts_{options.topology}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([row | made for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options))
