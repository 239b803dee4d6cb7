"""The experts of a transformers Gemma 4 model, computed by `pallas_ops`.

transformers (5 and later) lets the experts of a model be computed by any function that is
registered under a name: `use_pallas_experts(model)` registers ours and has the model take it. The
parameters stay where they are, under the names they have, so checkpoints, optimizers and hooks see
no difference. CPU tensors take the references, XLA tensors the Pallas kernels.
"""

import torch
from torch import Tensor, nn

from pallas_ops import combine, gelu_gate, gmm, permute, routing_plan

NAME = "pallas_gmm"
"""Of this implementation among those of transformers."""
_ACTIVATIONS = ("gelu_pytorch_tanh",)


def use_pallas_experts(model: nn.Module) -> int:
    """Has every experts module of `model`, a transformers Gemma 4 model, computed by
    `pallas_experts`; returns how many there are. model.set_experts_implementation("eager") or
    "grouped_mm" undoes it.

    Raises ValueError for a model without such experts or with another gate activation; ImportError
    where transformers has no interface for experts.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            "use_pallas_experts needs transformers 5 or later, whose experts can be exchanged: "
            "pip install 'transformers>=5'"
        ) from error
    experts = [module for module in model.modules() if _are_experts(module)]
    if not experts or not hasattr(model, "set_experts_implementation"):
        raise ValueError(
            f"model: {type(model).__name__} has no experts to exchange; give a transformers "
            "Gemma 4 model with enable_moe_block"
        )
    for module in experts:
        _check(module)
    ALL_EXPERTS_FUNCTIONS.register(NAME, pallas_experts)
    model.set_experts_implementation(NAME)
    return len(experts)


def pallas_experts(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What a transformers experts module returns, as a function of it and of its arguments.

    Args:
        experts: has gate_up_proj [E, 2F, D] (gate rows, then up rows) and down_proj [E, D, F], and
            nothing else. Cast to hidden_states.dtype inside.
        hidden_states: [T, D], any float dtype.
        top_k_index: integers [T, K], experts of each token.
        top_k_weights: [T, K].

    Returns:
        [T, D] of hidden_states.dtype: the weighted sum over k of
        down_e(gelu_tanh(gate_e x) * up_e x), summed in fp32 and rounded once. Differentiable in
        hidden_states, top_k_weights and both parameters.
    """
    gate_up, down = experts.gate_up_proj, experts.down_proj
    plan = routing_plan(top_k_index.to(torch.int32), down.shape[0])
    rows = permute(hidden_states, plan)  # [T * K, D]
    hidden = gmm(rows, gate_up, plan.group_sizes, transpose_rhs=True)
    rows = gmm(gelu_gate(hidden), down, plan.group_sizes, transpose_rhs=True)
    return combine(rows, top_k_weights, plan)


def _are_experts(module: nn.Module) -> bool:
    names = ("gate_up_proj", "down_proj")
    return all(isinstance(getattr(module, name, None), nn.Parameter) for name in names)


def _check(module: nn.Module) -> None:
    name, activation = type(module).__name__, getattr(module.config, "hidden_activation", None)
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"hidden_activation = {activation!r}: the experts of {name} need "
            f"{' or '.join(_ACTIVATIONS)}"
        )
    # What transformers' decorator says of how a class stores its weights, and where; releases that
    # do not say it have no other way.
    expected = {
        "has_gate": True,
        "has_bias": False,
        "has_post_expert_norm": False,
        "is_transposed": False,
        "is_concatenated": True,
        "_is_expert_parallel": False,
    }
    for field, value in expected.items():
        found = getattr(module, field, value)
        if found != value:
            raise ValueError(
                f"{field} = {found!r}: the experts of {name} are not stored as "
                f"Gemma 4's on one device are ({field} = {value})"
            )
