"""MoE ops for PyTorch: plain torch on CPU tensors, Pallas kernels on XLA tensors.

Every op is a `torch.library.custom_op` with a fake, autograd written with the ops themselves, and
one folder: `reference.py` (plain torch), `kernel.py` (JAX), `op.py`, `shapes.py`. Importing this
package imports neither jax nor torch_xla; the first XLA tensor does.

Legend: T tokens, D model width, F expert hidden, E experts, K top-k, R = T*K routed rows, and for
the matrix products G groups, [K, N] one group's matrix.
"""

from pallas_ops.activation.op import gelu_gate, split_gate_up
from pallas_ops.attention.op import attention
from pallas_ops.combine.op import combine
from pallas_ops.expert_mlp.op import expert_mlp
from pallas_ops.gather_fence.op import gather_fence
from pallas_ops.gmm.op import gmm
from pallas_ops.norm_rope.op import norm_rope
from pallas_ops.permute.op import permute
from pallas_ops.routing.op import RoutingPlan, routing_plan
from pallas_ops.sharding import OpSharding
from pallas_ops.split_gmm.op import split_gmm
from pallas_ops.split_gmm.reference import join_experts, split_experts
from pallas_ops.tgmm.op import tgmm

__all__ = [
    "OpSharding",
    "RoutingPlan",
    "attention",
    "combine",
    "expert_mlp",
    "gather_fence",
    "gelu_gate",
    "gmm",
    "join_experts",
    "norm_rope",
    "permute",
    "routing_plan",
    "split_experts",
    "split_gate_up",
    "split_gmm",
    "tgmm",
]
