"""What one decoder layer is. `Gemma4Config.layers` resolves a configuration to these."""

from dataclasses import dataclass
from typing import Literal, get_args

LayerKind = Literal["sliding_attention", "full_attention"]
RopeType = Literal["default", "proportional"]

SLIDING: LayerKind = "sliding_attention"
FULL: LayerKind = "full_attention"


def require(holds: bool, name: str, value: object, remedy: str) -> None:
    """Raise ValueError naming the field, its value and what to do, unless `holds`."""
    if not holds:
        raise ValueError(f"{name} = {value!r}: {remedy}")


def require_count(name: str, value: object, where: str = "") -> None:
    """`require` that `value` is a whole number of at least 1."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    require(is_count, name, value, f"{where}give a whole number of at least 1")


def require_number(name: str, value: object) -> None:
    """`require` that `value` is a real number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number, name, value, "give a number")


def require_choice(name: str, value: object, choices: object) -> None:
    """`require` that `value` is one of a Literal's options."""
    options = get_args(choices)
    require(value in options, name, value, f"give one of {', '.join(map(repr, options))}")


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """One rotary table. With n = int(partial_rotary_factor * head_dim // 2), frequency j of the
    head_dim / 2 is theta ** (-2 j / head_dim) / factor for j < n and zero for the rest
    ("proportional": the exponent's denominator is the whole head, not the rotated part)."""

    theta: float
    """Base wavelength."""
    rope_type: RopeType = "default"
    """With "default" every pair turns, undivided; "proportional" reads the two fields below."""
    partial_rotary_factor: float = 1.0
    """Share of the pairs that turn."""
    factor: float = 1.0
    """Divides every frequency (context extension)."""

    def __post_init__(self) -> None:
        require_choice("rope_type", self.rope_type, RopeType)
        for name in ("theta", "partial_rotary_factor", "factor"):
            require_number(name, getattr(self, name))
        require(self.theta > 0, "theta", self.theta, "give a positive wavelength, such as 1e4")
        require(
            0 <= self.partial_rotary_factor <= 1,
            "partial_rotary_factor",
            self.partial_rotary_factor,
            "give the share of pairs that turn, between 0 and 1",
        )
        require(self.factor > 0, "factor", self.factor, "give a positive divisor; 1 is neutral")
        if self.rope_type == "default":
            for name in ("partial_rotary_factor", "factor"):
                value = getattr(self, name)
                require(value == 1, name, value, 'rope_type "default" has none: use "proportional"')


LOCAL_ROPE = RopeSpec(theta=1e4)
"""Published rotary table of sliding layers."""
GLOBAL_ROPE = RopeSpec(theta=1e6, rope_type="proportional", partial_rotary_factor=0.25)
"""Published rotary table of full layers."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Everything that may differ between two layers; layers with equal specs stack together."""

    kind: LayerKind
    """The layer's name in `layer_types`."""
    head_dim: int
    """H, size of one head."""
    num_kv_heads: int
    """G, key heads (and value heads)."""
    k_eq_v: bool
    """Values are the raw key projection; there is no v_proj."""
    window: int | None
    """Keys a query may see, itself included; None sees all before it."""
    rope: RopeSpec
    """The rotary table of queries and keys."""


@dataclass(frozen=True)
class Segment:
    """A run of consecutive equal layers inside one period."""

    spec: LayerSpec
    """What each of the layers is."""
    count: int
    """C, how many there are."""


@dataclass(frozen=True, kw_only=True)
class LayerOverride:
    """Head sizes of one layer where they are not those of its kind (Hugging Face's
    `per_layer_config`). None keeps the kind's value."""

    layer: int
    """Index of the layer, from 0."""
    head_dim: int | None = None
    """H of this layer."""
    num_key_value_heads: int | None = None
    """G of this layer."""
