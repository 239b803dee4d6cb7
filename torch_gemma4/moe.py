"""The experts: rows sorted by expert, two grouped products, and a weighted sum back to tokens.

No capacity and no dropping: every token meets all its K experts.
"""

import torch
from torch import Tensor, nn

from pallas_ops import (
    combine,
    expert_mlp,
    gather_fence,
    gelu_gate,
    permute,
    routing_plan,
    split_gmm,
)
from torch_gemma4.config import Gemma4Config
from torch_gemma4.execution import Execution
from torch_gemma4.linear import unset


class Experts(nn.Module):
    """x [T, D], expert_ids int32 [T, K], weights [T, K] -> [T, D], the weighted sum over k of
    down_e(gelu_tanh(gate_e x) * up_e x) for e = expert_ids[t, k].

    Parameters have D last, so that no full matrix is relaid out around the kernels: `gate_up`
    [E, 2F, D] (gate rows, then up rows) and `down` [E, F, D]. With split_expert_weights they are
    `gate_up_halves` [2, E * F, D] and `down_halves` [2, E * F/2, D]: what
    `pallas_ops.split_experts` makes, but for its two middle dimensions, which are one here, as
    torch_xla places no sharded tensor of more than five dimensions and layers are stacked in two.
    """

    def __init__(self, config: Gemma4Config, execution: Execution) -> None:
        super().__init__()
        self.num_experts, width = config.num_experts, config.moe_intermediate_size
        self.is_split = config.split_expert_weights
        if config.split_expert_weights:
            self.gate_up_halves = unset(2, self.num_experts * width, config.hidden_size)
            self.down_halves = unset(2, self.num_experts * width // 2, config.hidden_size)
        else:
            self.gate_up = unset(self.num_experts, 2 * width, config.hidden_size)
            self.down = unset(self.num_experts, width, config.hidden_size)
        self.sharding = execution.sharding
        self.dispatch = execution.dispatch
        self.is_fenced = execution.fence_expert_gathers
        self.reduce_dtype = execution.precision.reduce

    def fence(self, router_in: Tensor, dtype: torch.dtype) -> Tensor:
        """The router's input [T, D], behind the gathers of these weights in `dtype`, that of x in
        `forward`, where the execution fences them."""
        if not self.is_fenced:
            return router_in
        return gather_fence(router_in, self._weights(), dtype=dtype, sharding=self.sharding)

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        plan = routing_plan(
            expert_ids,
            self.num_experts,
            implementation=self.dispatch,
            sharding=self.sharding,
        )
        placed = {"reduce_dtype": self.reduce_dtype, "sharding": self.sharding}
        rows = permute(x, plan, sharding=self.sharding)  # [R, D]
        gate_up, down = self._weights()
        if self.is_split:
            h = split_gmm(rows, gate_up, plan.group_sizes, transpose_rhs=True, **placed)
            rows = split_gmm(gelu_gate(h), down, plan.group_sizes, **placed)
        else:
            rows = expert_mlp(rows, gate_up, down, plan.group_sizes, **placed)
        return combine(rows, weights, plan, sharding=self.sharding)

    def _weights(self) -> tuple[Tensor, Tensor]:
        """gate_up and down, as the products take them."""
        if not self.is_split:
            return self.gate_up, self.down
        by_expert = (self.num_experts, -1)
        return self.gate_up_halves.unflatten(1, by_expert), self.down_halves.unflatten(1, by_expert)
