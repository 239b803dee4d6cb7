"""One decoder layer, and the stack of all of them as a loop over periods.

Gemma 4 repeats a period of layers (five local and one global). Equal layers of a period form a
segment, and a segment's parameters are stored [P, C, ...]: P periods, C layers. The stack loops
over periods and, inside, over a segment's layers, through one `DecoderLayer` a segment that holds
no values of its own, the template. With a compiled loop, compile time does not grow with depth.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pallas_ops.sharding import num_row_shards
from torch_gemma4.attention import Attention
from torch_gemma4.config import Gemma4Config, LayerSpec
from torch_gemma4.execution import Body, Execution, wide
from torch_gemma4.linear import unset
from torch_gemma4.mlp import MLP
from torch_gemma4.moe import Experts
from torch_gemma4.norm import RMSNorm, rms_norms
from torch_gemma4.rope import rope_tables
from torch_gemma4.router import Router, RouterStatistics, router_statistics
from torch_gemma4.scales import copies, spread

_SCALE_NDIM = 3
"""Of a stacked vector [P, C, D]: norm scales and their like, and biases."""


class DecoderLayer(nn.Module):
    """x [B, S, D], rotary tables, segment_ids int32 [B, S] or None -> (x, RouterStatistics; an
    empty tuple without experts).

    The dense MLP and the experts read the same residual r, each under its own norm, as does the
    router under one without scale: three norms, one rsqrt. `layer_scalar` multiplies the whole
    stream.
    """

    def __init__(self, config: Gemma4Config, spec: LayerSpec, execution: Execution) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.eps = eps
        self.has_experts = config.enable_moe_block
        self.constrain = execution.constrain
        self.input_norm = RMSNorm(dim, eps)
        self.attention = Attention(config, spec, execution)
        self.post_attention_norm = RMSNorm(dim, eps)
        self.pre_mlp_norm = RMSNorm(dim, eps)
        self.mlp = MLP(dim, config.intermediate_size, execution)
        if self.has_experts:
            self.post_mlp_norm = RMSNorm(dim, eps)
            self.router = Router(dim, config.num_experts, config.top_k_experts, execution)
            self.pre_experts_norm = RMSNorm(dim, eps)
            self.experts = Experts(config, execution)
            self.post_experts_norm = RMSNorm(dim, eps)
        self.post_ffw_norm = RMSNorm(dim, eps)
        self.layer_scalar = unset(1).requires_grad_(config.layer_scalar_trainable)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, segment_ids: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = self.constrain(x, "hidden")
        a = self.attention(self.input_norm(x), cos, sin, segment_ids)
        r = x + self.post_attention_norm(a)
        update, statistics = self._dense_and_routed(r) if self.has_experts else self._dense(r)
        y = (r + self.post_ffw_norm(update)).to(wide(r.dtype))
        # In float32, as layer_scalar's gradient is one sum over the whole stream.
        return (y * spread(self.layer_scalar.to(y.dtype), y)).to(x.dtype), statistics

    def _dense(self, r: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.mlp(self.pre_mlp_norm(r)), ()

    def _dense_and_routed(self, r: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        router_dtype = wide(r.dtype)
        dense_in, experts_in, router_in = rms_norms(
            r,
            (
                self.pre_mlp_norm.weight,
                self.pre_experts_norm.weight,
                self.router.input_scale(router_dtype),
            ),
            self.eps,
            (r.dtype, r.dtype, router_dtype),
        )
        dense = self.post_mlp_norm(self.mlp(dense_in))
        routing = self.router(self.experts.fence(router_in.flatten(0, 1), r.dtype))
        routed = self.experts(experts_in.flatten(0, 1), routing.expert_ids, routing.weights)
        routed = self.post_experts_norm(routed.view_as(r))
        return dense + routed, router_statistics(routing, r.shape[0])


class StackedParameters(nn.Module):
    """The parameters of a template under the same names, each with leading dims `stack`."""

    def __init__(self, template: nn.Module, stack: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        for name, child in template.named_children():
            self.add_module(name, StackedParameters(child, stack, dtype))
        for name, param in template.named_parameters(recurse=False):
            stacked = unset(*stack, *param.shape, dtype=dtype).requires_grad_(param.requires_grad)
            self.register_parameter(name, stacked)


class DecoderStack(nn.Module):
    """All layers. Parameters are `segments.{j}.{name in DecoderLayer}`, [P, C, ...] each.

    `templates[j]` computes every layer of segment j; a forward hook on one of its submodules (say
    `templates[j].attention`) sees each layer's call in the order they run.
    """

    def __init__(self, config: Gemma4Config, execution: Execution) -> None:
        super().__init__()
        self.loop, self.constrain = execution.loop, execution.constrain
        self.num_shards = num_row_shards(execution.sharding)
        self.num_periods = config.num_periods
        self.counts = tuple(segment.count for segment in config.segments)
        specs = [segment.spec for segment in config.segments]
        with torch.device("meta"):
            # A tuple, so that nn.Module does not take the templates' empty parameters for its own.
            self.templates = tuple(DecoderLayer(config, spec, execution) for spec in specs)
        self.segments = nn.ModuleList(
            StackedParameters(template, (self.num_periods, count), execution.precision.params)
            for template, count in zip(self.templates, self.counts, strict=True)
        )
        # Layers with equal rotary tables share them.
        self.rope_kinds = tuple(dict.fromkeys((spec.rope, spec.head_dim) for spec in specs))
        recompute = execution.recompute or (lambda body: body)
        table_of = [self.rope_kinds.index((spec.rope, spec.head_dim)) for spec in specs]
        run_layers = (
            partial(_run_layer, template, 2 * table, 2 * len(self.rope_kinds))
            for template, table in zip(self.templates, table_of, strict=True)
        )
        self._bodies: tuple[Body, ...] = tuple(
            recompute(run_layer if count > 1 else partial(_run_only_layer, run_layer))
            for run_layer, count in zip(run_layers, self.counts, strict=True)
        )
        self._period_body: Body = self._run_period

    def forward(
        self, x: Tensor, positions: Tensor, segment_ids: Tensor | None
    ) -> tuple[Tensor, RouterStatistics | None]:
        """x [B, S, D] -> (x, statistics with a leading dim L, in layer order; None without
        experts). positions [S] or [B, S] turn queries and keys; attention stays inside equal
        segment_ids [B, S]."""
        tables = [
            table
            for rope, head_dim in self.rope_kinds
            for table in rope_tables(rope, head_dim, positions, x.dtype)
        ]
        constants = (*tables, *(() if segment_ids is None else (segment_ids,)))
        params = {
            name: copies(param, self.num_shards, self.constrain)
            if self.num_shards > 1 and param.ndim == _SCALE_NDIM
            else param
            for name, param in self.segments.named_parameters()
        }
        x, outputs = self.loop(self._period_body, x, params, constants)
        outputs = [output.flatten(0, 1) for output in outputs]  # [P, layers a period, ...]
        return x, RouterStatistics(*outputs) if outputs else None

    def layer_index(self, segment: int, period: int, layer: int) -> int:
        """Place in the model of the layer that is [period, layer] of a segment's parameters."""
        return period * sum(self.counts) + sum(self.counts[:segment]) + layer

    def _run_period(
        self, x: Tensor, params: dict[str, Tensor], constants: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        by_segment = []
        for j, (body, count) in enumerate(zip(self._bodies, self.counts, strict=True)):
            prefix = f"{j}."
            own = {n.removeprefix(prefix): t for n, t in params.items() if n.startswith(prefix)}
            run = partial(self.loop, body) if count > 1 else body
            x, outputs = run(x, own, constants)
            by_segment.append(outputs)
        return x, tuple(torch.cat(column) for column in zip(*by_segment, strict=True))


def _run_layer(
    template: DecoderLayer,
    table: int,
    num_tables: int,
    x: Tensor,
    params: dict[str, Tensor],
    constants: tuple[Tensor, ...],
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Body of one layer. constants: cos and sin of every rope kind, then perhaps segment_ids."""
    cos, sin = constants[table : table + 2]
    segment_ids = constants[num_tables] if len(constants) > num_tables else None
    return functional_call(template, params, (x, cos, sin, segment_ids), strict=True)


def _run_only_layer(
    run_layer: Body, x: Tensor, params: dict[str, Tensor], constants: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Body of a segment of one layer, its parameters [1, ...]. They lose that dim in here so that
    recomputation saves the parameters themselves: a view of one would be one more value for a
    compiled loop to keep from every iteration."""
    x, outputs = run_layer(x, {name: param.squeeze(0) for name, param in params.items()}, constants)
    return x, tuple(output[None] for output in outputs)
