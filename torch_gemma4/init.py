"""Every initial value of the model, in one place."""

import hashlib
import math
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from torch_gemma4.model import Gemma4ForCausalLM

_STACKED = "stack.segments."


def init_parameters(model: Gemma4ForCausalLM, seed: int = 0) -> None:
    """Fills all parameters from scratch. N(s) is a normal distribution of mean 0 and deviation s.

    | parameter                                       | start      | reason |
    | ----------------------------------------------- | ---------- | ------ |
    | embedding.weight, lm_head.weight [V, D]         | N(D^-1/2)  | (1)    |
    | *_proj.weight, router.proj.weight [out, in]     | N(in^-1/2) | (2)    |
    | experts.gate_up [E, 2F, D], .down [E, F, D]     | N(D^-1/2), N(F^-1/2) | (2) |
    | attention.q_norm.weight, .k_norm.weight [H]     | H^-1/4     | (3)    |
    | other *_norm.weight, router.scale [D]           | 1          | (4)    |
    | router.per_expert_scale [E], layer_scalar [1]   | 1          | (5)    |
    | *_proj.bias (attention_bias only)               | 0          | (6)    |

    (1) The look-up times sqrt(D) starts the stream at unit variance, and a final state of unit RMS
        gives logits N(1), softcap aside. Then E[log sum exp logits] = ln V + 1/2 (the mean of a
        log-normal) and E[logit of the label] = 0: the first loss is ln V + 1/2, 12.977 at
        V = 262,144, as the reference expects (published: 13.004).
    (2) Keeps the variance of a unit-variance input at every width; at D = 2816 it is within 6 % of
        Hugging Face's fixed 0.02. The router sees unit-length vectors, so its logits are N(in^-1/2)
        too, and it starts undecided, near 1/E for each expert.
    (3) Scores are q.k without 1/sqrt(H). With norms of 1 they would have deviation sqrt(H), 16 and
        22.6 in the 26B, and attention would start almost one-hot; H^-1/4 on each side makes it 1.
    (4) Plain RMSNorm: 1 is neutral. (5) Neutral. The published checkpoint has other values, so
        loading never falls back to these. (6) The projection starts linear.

    Deterministic in `seed`: each layer's parameter comes from a CPU generator keyed by seed and
    name, in float32, whatever the device, dtype, device count, stacking or split of experts;
    layers of a shape also keep their values when others are added after them.

    Raises ValueError for a parameter on the meta device, which has no place for a value.
    """
    for name, index, value in initial_values(model, seed):
        param = model.get_parameter(name)
        if param.is_meta:
            raise ValueError(
                f"{name}: on the meta device; call model.to_empty(device=...) first, or place "
                "the tensors of initial_values(model, seed) yourself"
            )
        with torch.no_grad():
            param[index].copy_(value)


def initial_values(
    model: Gemma4ForCausalLM, seed: int = 0
) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """The values of `init_parameters`, one layer's parameter at a time: (name, index, value), to be
    copied into model.get_parameter(name)[index]. Values are float32 on the CPU; the model may lie
    on any device, meta included."""
    for name, param in model.named_parameters():
        if not name.startswith(_STACKED):
            yield name, (), _initial_value(name, name, param.shape, seed)
            continue
        segment, _, own_name = name.removeprefix(_STACKED).partition(".")
        for index in product(*map(range, param.shape[:2])):
            layer = model.stack.layer_index(int(segment), *index)
            key = f"layers.{layer}.{own_name.removesuffix('_halves')}"
            shape = own_shape = param.shape[2:]
            if own_name.endswith("_halves"):
                num_experts = model.config.num_experts
                shape = torch.Size((num_experts, own_shape[:-1].numel() // num_experts, shape[-1]))
            yield name, index, _initial_value(own_name, key, shape, seed).view(own_shape)


def _initial_value(name: str, key: str, shape: torch.Size, seed: int) -> Tensor:
    """One layer's parameter `name`; `key` names it in the model."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return torch.full(shape, shape[0] ** -0.25, device="cpu")
    if name.endswith("bias"):
        return torch.zeros(shape, device="cpu")
    if len(shape) == 1:
        return torch.ones(shape, device="cpu")
    # Products contract the last dim of every matrix but experts.down [E, F, D].
    fan_in = shape[-2] if name.startswith("experts.down") else shape[-1]
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    normal = torch.randn(shape, generator=generator, device="cpu")
    return normal.mul_(1 / math.sqrt(fan_in))
