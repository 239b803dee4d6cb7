"""Where every parameter lies on the mesh: one table of name patterns.

A parameter is stored sharded over the `fsdp` axis along one dimension, or whole on every device;
the `data` axis holds replicas. That is FSDP by rule: weights are gathered for use, gradients leave
as their parameter lies. Every parameter matches exactly one rule. Dimensions count from the end, so
a rule holds for a parameter alone and for one stacked [periods, layers, ...].
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_gemma4.config import Gemma4Config
    from train.config import MeshConfig

Spec = tuple[str | tuple[str, ...] | None, ...]
"""One entry a dimension: None, or the mesh axes that split it."""

ROW_AXES = ("data", "fsdp")
"""Axes that split the batch, hence token rows."""
WEIGHT_AXIS = "fsdp"
"""Axis that splits the weights."""


@dataclass(frozen=True)
class Rule:
    """How the parameters of one pattern are stored."""

    pattern: str
    """Matched against the whole parameter name; `*` is anything."""
    dims: tuple[int, ...]
    """Dimensions to split, in order of preference: the first one that the mesh divides. Empty:
    replicated."""
    reason: str
    """Why so."""


RULES: tuple[Rule, ...] = (
    Rule("*embedding.weight", (-2,), "[V, D]: whole rows, looked up from one gathered table"),
    Rule("*lm_head.weight", (-2,), "[V, D]: as the embedding"),
    Rule("*experts.gate_up", (-3, -1), "[E, 2F, D]: whole experts a chip; else columns of D"),
    Rule("*experts.down", (-3, -1), "[E, F, D]: as gate_up"),
    Rule(
        "*experts.*_halves",
        (-2,),
        "[2, E * F, D]: of each half the rows of half an expert, or more",
    ),
    Rule("*attention.[qkv]_proj.weight", (-2, -1), "[heads * H, D]: head width divides 128 chips"),
    Rule("*attention.o_proj.weight", (-1, -2), "[D, N * H]: as the other projections"),
    Rule("*mlp.gate_up_proj.weight", (-1, -2), "[2M, D]: 2112 is no multiple of 128, D is"),
    Rule("*mlp.down_proj.weight", (-2, -1), "[D, M]: the same dimension D"),
    Rule("*router.proj.weight", (-2, -1), "[E, D]: small, and gathered in fp32"),
    Rule("*_norm.weight", (), "[D] or [H]: a sharded scale costs its own tiny collectives"),
    Rule("*_proj.bias", (), "1-D: as the norms"),
    Rule("*router.scale", (), "[D]: as the norms"),
    Rule("*router.per_expert_scale", (), "[E]: as the norms"),
    Rule("*layer_scalar", (), "[1]"),
)


def rule_of(name: str) -> Rule:
    """The one rule of a parameter. Raises ValueError if none or several match."""
    matches = [rule for rule in RULES if fnmatchcase(name, rule.pattern)]
    if len(matches) != 1:
        found = ", ".join(repr(rule.pattern) for rule in matches) or "none"
        raise ValueError(
            f"parameter {name!r} must match exactly one sharding rule and matches {found}: add or "
            "narrow a pattern in train/sharding.py RULES"
        )
    return matches[0]


_HIDDEN = ("*attention.*_proj.weight", "*mlp.*_proj.weight", "*experts.*")


def is_hidden_matrix(name: str) -> bool:
    """Whether a parameter [..., rows, columns] maps hidden features to hidden features. Embedding,
    head and router are tables of classes, and no such matrices."""
    return any(fnmatchcase(name, pattern) for pattern in _HIDDEN)


def parameter_spec(name: str, shape: tuple[int, ...], num_shards: int) -> Spec:
    """The stored layout of parameter `name` when `num_shards` devices share it.

    Raises ValueError if the rule's dimensions are all indivisible, naming them.
    """
    rule = rule_of(name)
    if not rule.dims:
        return (None,) * len(shape)
    for dim in rule.dims:
        if shape[dim] % num_shards == 0:
            spec: list[str | None] = [None] * len(shape)
            spec[dim] = WEIGHT_AXIS
            return tuple(spec)
    sizes = ", ".join(str(shape[dim]) for dim in rule.dims)
    raise ValueError(
        f"parameter {name!r} of shape {list(shape)}: mesh.fsdp = {num_shards} divides none of the "
        f"dimensions its rule may split (sizes {sizes}); choose mesh.fsdp that divides one, or "
        "another model width"
    )


def expert_weight_dim(config: Gemma4Config, num_shards: int) -> int:
    """The split dimension of one layer's expert weights [E, F, D], as the kernels count it: 0 or
    2; in two halves always 0.

    Raises ValueError if the mesh divides neither, or not the experts that are in two halves.
    """
    if config.split_expert_weights:
        if config.num_experts % num_shards:
            raise ValueError(
                f"mesh.fsdp = {num_shards} does not divide model.num_experts = "
                f"{config.num_experts}, which model.split_expert_weights needs: choose mesh.fsdp "
                "that does, or turn that off"
            )
        return 0
    shape = (config.num_experts, config.moe_intermediate_size, config.hidden_size)
    return parameter_spec("experts.down", shape, num_shards).index(WEIGHT_AXIS)


@dataclass(frozen=True)
class ShardingRow:
    """One parameter of the printed table."""

    parameter: str
    """Its name."""
    pattern: str
    """The rule's pattern."""
    shape: tuple[int, ...]
    """Global shape."""
    spec: Spec
    """Layout."""
    bytes_per_chip: int
    """Of the fp32 parameter alone; optimizer state is twice that again."""


def sharding_table(config: Gemma4Config, mesh: MeshConfig) -> list[ShardingRow]:
    """The layout of every parameter of a model on a mesh, without allocating any of it."""
    import torch

    from torch_gemma4.model import Gemma4ForCausalLM

    with torch.device("meta"):
        model = Gemma4ForCausalLM(config)
    rows = []
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        spec = parameter_spec(name, shape, mesh.fsdp)
        share = mesh.fsdp if WEIGHT_AXIS in spec else 1
        rows.append(
            ShardingRow(name, rule_of(name).pattern, shape, spec, 4 * parameter.numel() // share)
        )
    return rows
