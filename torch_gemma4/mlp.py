"""The dense gated MLP that every layer has beside its experts."""

from functools import partial

from torch import Tensor, nn

from pallas_ops import gelu_gate
from torch_gemma4.execution import Execution
from torch_gemma4.linear import Linear


class MLP(nn.Module):
    """down(gelu_tanh(gate(x)) * up(x)) on x [..., D]. `gate_up_proj` [2M, D] holds the gate's rows,
    then the up projection's: one product forward, and backward one concatenation."""

    def __init__(self, hidden_size: int, intermediate_size: int, execution: Execution) -> None:
        super().__init__()
        linear = partial(Linear, execution=execution)
        self.gate_up_proj = linear(hidden_size, 2 * intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gelu_gate(self.gate_up_proj(x)))
