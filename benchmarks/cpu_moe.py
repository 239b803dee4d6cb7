"""One expert branch of Gemma 4 26B on CPU tensors: our ops beside `torch._grouped_mm` and dense.

    python -m benchmarks.cpu_moe

Every implementation runs forward and backward in turn, round after round in one process, so that a
busy machine slows all of them; the first round warms up. Baselines are written as Hugging Face's
grouped experts are: argsort, gather, grouped_mm, gate times up, grouped_mm, weights, sum. They come
in both orientations of the stored weights, and ratios are to the faster one. The dense bound is the
same number of multiplications in one expert: all T*K rows through one weight, which reads and
writes 1 / E of the memory, so no grouped product can reach it.
"""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pallas_ops import combine, gelu_gate, gmm, permute, routing_plan
from pallas_ops.combine.shapes import CPU_BRANCH

GROUPED = "grouped_mm"


@dataclass(frozen=True)
class Options:
    """Time one MoE branch, forward and backward, on CPU tensors."""

    num_tokens: int = CPU_BRANCH.num_tokens
    """T."""
    top_k: int = CPU_BRANCH.top_k
    """K, experts a token."""
    num_experts: int = CPU_BRANCH.num_experts
    """E."""
    width: int = CPU_BRANCH.width
    """D, model width."""
    hidden: int = 704
    """F, expert hidden width."""
    dtype: str = "bfloat16"
    """Of tokens and weights; routing weights are fp32 in ours."""
    rounds: int = 7
    """Timed rounds, after one that is not."""
    threads: int = 1
    """Threads of torch."""
    seed: int = 0
    """Of inputs and routing."""
    output: Path | None = None
    """JSON file for the numbers; none: the table only."""

    @property
    def flops(self) -> int:
        """Forward and backward: three products each of [R, D] x [D, 2F] and [R, F] x [F, D]."""
        return 3 * 2 * self.num_tokens * self.top_k * self.width * 3 * self.hidden


@dataclass(frozen=True)
class Branch:
    """One implementation: a forward over its own tensors."""

    name: str
    """Label of the row."""
    forward: Callable[[], Tensor]
    """Runs the branch."""
    leaves: tuple[Tensor, ...]
    """Tensors that get gradients; the weights last."""
    dout: Tensor
    """Cotangent of the output."""


def branches(options: Options) -> list[Branch]:
    """All implementations, on equal values."""
    torch.manual_seed(options.seed)
    tokens, top_k, experts = options.num_tokens, options.top_k, options.num_experts
    width, hidden, dtype = options.width, options.hidden, getattr(torch, options.dtype)

    def leaf(*shape):
        return torch.randn(shape).to(dtype).requires_grad_()

    def weight(*shape):
        # One random matrix, scaled a little otherwise in each expert: drawing all would take longer
        # than the measurement.
        scale = 1 + torch.arange(experts) / experts
        values = torch.randn(shape).mul(0.02).to(dtype) * scale.to(dtype)[:, None, None]
        return values.requires_grad_()

    def transposed(stored):
        return stored.detach().mT.contiguous().requires_grad_()

    ids = torch.rand(tokens, experts).topk(top_k).indices.int()
    weights = torch.rand(tokens, top_k, requires_grad=True)
    x, dout = leaf(tokens, width), torch.randn(tokens, width).to(dtype)
    gate_up, down = weight(2 * hidden, width), weight(hidden, width)  # [E, 2F, D], [E, F, D]
    gate_up_t, down_t = transposed(gate_up), transposed(down)  # [E, D, 2F], [E, D, F]
    rows, drows = leaf(tokens * top_k, width), torch.randn(tokens * top_k, width).to(dtype)
    one_gate_up, one_down = leaf(2 * hidden, width), leaf(hidden, width)

    def ours():
        plan = routing_plan(ids, experts)
        h = gmm(permute(x, plan), gate_up, plan.group_sizes, transpose_rhs=True)
        return combine(gmm(gelu_gate(h), down, plan.group_sizes), weights, plan)

    def grouped(first, second):  # [E, D, 2F], [E, F, D], both perhaps transposed views
        slots = ids.flatten().argsort(stable=True)
        ends = torch.bincount(ids.flatten(), minlength=experts).cumsum(0).int()
        gate, up = torch._grouped_mm(x[slots // top_k], first, offs=ends).chunk(2, dim=-1)
        out = torch._grouped_mm(F.gelu(gate, approximate="tanh") * up, second, offs=ends)
        out = out * weights.to(dtype).flatten()[slots, None]
        return out[slots.argsort()].view(tokens, top_k, width).sum(1)

    def dense():
        gate, up = (rows @ one_gate_up.t()).chunk(2, dim=-1)
        return (F.gelu(gate, approximate="tanh") * up) @ one_down

    return [
        Branch("pallas_ops", ours, (x, weights, gate_up, down), dout),
        Branch(
            f"{GROUPED}, as HF stores W",
            lambda: grouped(gate_up.mT, down_t.mT),
            (x, weights, gate_up, down_t),
            dout,
        ),
        Branch(
            f"{GROUPED}, W transposed",
            lambda: grouped(gate_up_t, down),
            (x, weights, gate_up_t, down),
            dout,
        ),
        Branch("dense bound", dense, (rows, one_gate_up, one_down), drows),
    ]


def run(branch: Branch) -> tuple[float, float, float]:
    """Wall seconds forward and backward, and CPU seconds of both."""
    for tensor in branch.leaves:
        tensor.grad = None  # as an optimizer's zero_grad: memory of old gradients is free again
    cpu, start = time.process_time(), time.perf_counter()
    out = branch.forward()
    middle = time.perf_counter()
    out.backward(branch.dout)
    return middle - start, time.perf_counter() - middle, time.process_time() - cpu


def check_equal(ours: Branch, theirs: Branch, tolerance: float = 0.03) -> None:
    """Output and gradients of tokens and routing weights agree, or the comparison means nothing."""
    results = []
    for branch in (ours, theirs):
        for tensor in branch.leaves:
            tensor.grad = None
        out = branch.forward()
        out.backward(branch.dout)
        results.append((out.detach().float(), *(t.grad.float() for t in branch.leaves[:2])))
    for got, want in zip(*results, strict=True):
        error = (got - want).norm() / want.norm()
        if not error <= tolerance:
            raise RuntimeError(f"{ours.name} and {theirs.name} differ by {error:.3g}")


def summary(times: list[tuple[float, float, float]], flops: int) -> dict[str, float]:
    """Medians and bests of one implementation, in seconds."""
    total = [forward + backward for forward, backward, _ in times]
    forward, backward, cpu = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "median_s": statistics.median(total),
        "best_s": min(total),
        "forward_s": forward,
        "backward_s": backward,
        "cpu_s": cpu,
        "gflop_per_s": flops / statistics.median(total) / 1e9,
    }


def measure(options: Options) -> dict[str, dict[str, float]]:
    """Interleaved rounds of all implementations, with ratios of medians."""
    torch.set_num_threads(options.threads)
    all_branches = branches(options)
    check_equal(all_branches[0], all_branches[1])
    times: dict[str, list[tuple[float, float, float]]] = {b.name: [] for b in all_branches}
    for round_ in range(1 + options.rounds):
        for branch in all_branches:
            seconds = run(branch)
            if round_:
                times[branch.name].append(seconds)
    rows = {name: summary(each, options.flops) for name, each in times.items()}
    grouped = min(row["median_s"] for name, row in rows.items() if name.startswith(GROUPED))
    for row in rows.values():
        row["ratio_to_grouped_mm"] = row["median_s"] / grouped
        row["ratio_to_dense"] = row["median_s"] / rows["dense bound"]["median_s"]
    return rows


def show(rows: dict[str, dict[str, float]], options: Options) -> None:
    """Print the table."""
    table = Table(
        title=f"MoE branch, {options.width} x {options.hidden}, {options.num_experts} experts, top "
        f"{options.top_k}, {options.num_tokens} tokens, {options.dtype}, threads {options.threads}",
        caption=f"ms, forward + backward; {options.rounds} interleaved rounds; ratios of medians",
    )
    table.add_column("implementation", no_wrap=True)
    milliseconds = ("median_s", "best_s", "forward_s", "backward_s", "cpu_s")
    ratios = ("ratio_to_grouped_mm", "ratio_to_dense")
    headings = ("median", "best", "forward", "backward", "CPU", "/ grouped", "/ dense")
    for heading in (*headings, "GFLOP/s"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        cells = [f"{1e3 * row[key]:,.0f}" for key in milliseconds]
        cells += [f"{row[key]:.2f}" for key in ratios]
        table.add_row(name, *cells, f"{row['gflop_per_s']:,.0f}")
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def cpu_name() -> str:
    """The processor's name; Linux tells more than `platform.processor()`."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main(options: Options) -> None:
    """Measure, print, write."""
    rows = measure(options)
    show(rows, options)
    report = {
        "command": " ".join(["python -m benchmarks.cpu_moe", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "options": {key: value for key, value in asdict(options).items() if key != "output"},
        "results": rows,
    }
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m benchmarks.cpu_moe"))
