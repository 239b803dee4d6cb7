"""AdamW and clipping, on device tensors: no value is read back.

The step count and the learning rate are tensors, so no step compiles anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from train.guards import Guards
from train.schedule import learning_rate

if TYPE_CHECKING:
    from train.config import OptimConfig


Direction = tuple[dict[str, Tensor], Tensor]
"""(a parameter's new moments by kind, what learning rate times it is subtracted from it)."""


def _zeros_like(name: str, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.float32)


def global_norm(tensors: list[Tensor]) -> Tensor:
    """Joint norm, a float32 scalar; squares are summed in float32 whatever the tensors' dtype."""
    return torch.stack([tensor.to(torch.float32).square().sum() for tensor in tensors]).sum().sqrt()


def clip_by_global_norm(grads: list[Tensor], max_norm: float) -> Tensor:
    """Scales `grads` in place so that their joint norm is at most `max_norm`; returns the norm
    they had, a float32 scalar.

    Squares are summed, and scaled gradients rounded once, in float32 whatever the gradients' dtype.
    (torch_xla's own clip_grad_norm_ sums in the gradients' dtype.)
    """
    norm = global_norm(grads)
    scale = (max_norm / norm.clamp(min=1e-12)).clamp(max=1.0)
    for grad in grads:
        grad.copy_(grad.to(torch.float32) * scale)
    return norm


class AdamW:
    """AdamW with fp32 moments (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101).

    Decoupled weight decay applies to matrices only: not to norms, biases, scales and scalars. Which
    those are is said by `decays(name)`, since a stacked scale is not 1-D any more. State exists
    from construction, so the first step compiles the same program as all others. A parameter that
    does not require grad is left out.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        config: OptimConfig,
        num_steps: int,
        *,
        decays: Callable[[str], bool],
        zeros_like: Callable[[str, Tensor], Tensor] = _zeros_like,
    ) -> None:
        """`zeros_like(name, parameter)` makes a moment, float32 of the parameter's shape: on a
        mesh, one that lies as the parameter does. Raises ValueError if no parameter requires
        grad."""
        self.config, self.num_steps = config, num_steps
        self.parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        if not self.parameters:
            raise ValueError(
                f"none of {len(parameters)} parameters requires grad: there is nothing to train"
            )
        self.decays = {name: decays(name) for name in self.parameters}
        self.moments: dict[str, dict[str, Tensor]] = {}
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                for kind in self._kinds(name):
                    self.moments.setdefault(kind, {})[name] = zeros_like(name, parameter)
            device = next(iter(self.parameters.values())).device
            self.num_updates = torch.zeros((), dtype=torch.int32, device=device)
            self.guards = Guards(config, device)

    def state(self) -> dict[str, Tensor]:
        """The live tensors that a checkpoint holds besides the parameters."""
        moments = {
            f"{kind}/{name}": tensor
            for kind, tensors in self.moments.items()
            for name, tensor in tensors.items()
        }
        return moments | {"num_updates": self.num_updates} | self.guards.state()

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of every parameter, by name. Raises ValueError naming those without one."""
        missing = [name for name, p in self.parameters.items() if p.grad is None]
        if missing:
            raise ValueError(
                f"no gradient for {len(missing)} of {len(self.parameters)} parameters: "
                f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}; call backward() "
                "of a loss that depends on them, or set requires_grad_(False) before the optimizer "
                "is made"
            )
        return {name: p.grad for name, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, is_taken: Tensor | None = None) -> Tensor:
        """Updates the parameters in place from their `.grad`; returns the learning rate used, a
        float32 scalar. With `is_taken`, a bool scalar that is false, no bit of the parameters and
        the state changes. Raises ValueError naming parameters without a gradient."""
        config, grads = self.config, self.gradients()
        self.num_updates += 1 if is_taken is None else is_taken.to(torch.int32)
        rate = learning_rate(self.num_updates, config, self.num_steps)
        count = self.num_updates.to(torch.float32)
        corrections = tuple(1 - torch.pow(beta, count) for beta in config.betas)
        for name, parameter in self.parameters.items():
            grad = grads[name].to(torch.float32)
            moments, update = self._direction(name, grad, corrections)
            if self.decays[name]:
                update = update + config.weight_decay * parameter
            changes = [(self.moments[kind][name], new) for kind, new in moments.items()]
            for old, new in (*changes, (parameter, parameter - rate * update)):
                if is_taken is not None:
                    # A select keeps the old bits whatever the new ones are, NaN included.
                    new = torch.where(is_taken, new.to(old.dtype), old)
                old.copy_(new)
        return rate

    def _kinds(self, name: str) -> tuple[str, ...]:
        """The moments that parameter `name` has."""
        return ("exp_avg", "exp_avg_sq")

    def _direction(self, name: str, grad: Tensor, corrections: tuple[Tensor, Tensor]) -> Direction:
        """From a float32 gradient, without weight decay; `corrections` of both moments for their
        start at zero."""
        beta1, beta2 = self.config.betas
        average = self.moments["exp_avg"][name] * beta1 + grad * (1 - beta1)
        square = self.moments["exp_avg_sq"][name] * beta2 + grad.square() * (1 - beta2)
        root = (square / corrections[1]).sqrt() + self.config.eps
        return {"exp_avg": average, "exp_avg_sq": square}, (average / corrections[0]) / root
