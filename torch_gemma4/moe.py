"""The experts: rows sorted by expert, two grouped products, and a weighted sum back to tokens.

No capacity and no dropping: every token meets all its K experts.
"""

from torch import Tensor, nn

from pallas_ops import combine, gelu_gate, gmm, permute, routing_plan
from torch_gemma4.config import Gemma4Config
from torch_gemma4.execution import Execution
from torch_gemma4.linear import unset


class Experts(nn.Module):
    """x [T, D], expert_ids int32 [T, K], weights [T, K] -> [T, D], the weighted sum over k of
    down_e(gelu_tanh(gate_e x) * up_e x) for e = expert_ids[t, k].

    Parameters have D last, so that no full matrix is relaid out around the kernels: `gate_up`
    [E, 2F, D] (gate rows, then up rows) and `down` [E, F, D].
    """

    def __init__(self, config: Gemma4Config, execution: Execution) -> None:
        super().__init__()
        num_experts, width = config.num_experts, config.moe_intermediate_size
        self.gate_up = unset(num_experts, 2 * width, config.hidden_size)
        self.down = unset(num_experts, width, config.hidden_size)
        self.sharding = execution.sharding
        self.dispatch = execution.dispatch
        self.reduce_dtype = execution.precision.reduce

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        plan = routing_plan(
            expert_ids,
            self.down.shape[0],
            implementation=self.dispatch,
            sharding=self.sharding,
        )
        placed = {"reduce_dtype": self.reduce_dtype, "sharding": self.sharding}
        rows = permute(x, plan, sharding=self.sharding)  # [R, D]
        hidden = gmm(rows, self.gate_up, plan.group_sizes, transpose_rhs=True, **placed)
        rows = gmm(gelu_gate(hidden), self.down, plan.group_sizes, **placed)
        return combine(rows, weights, plan, sharding=self.sharding)
