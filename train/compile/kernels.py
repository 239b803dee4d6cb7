"""The Pallas calls of a compiled step: which they are, and their static schedules.

The bridge knows every JAX function that the traced step called; each Pallas call in them is
compiled alone, with the compiler's dump, and matched with the program's custom calls by the shapes
of its operands and results. Steps that the routing decides are those of a random one
(static/routings.py).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from train.compile.hlo import Executed, Program
from train.compile.static.own_copies import OWN_COPIES
from train.compile.static.profile import CallProfile, profile_call
from train.compile.static.routings import random_group_sizes, random_windows

if TYPE_CHECKING:
    from pallas_ops.bridge import Lowering
    from train.compile.static.grid_steps import PallasCall

KernelKey = tuple[tuple[tuple[str, tuple[int, ...]], ...], tuple[tuple[str, tuple[int, ...]], ...]]
"""HLO dtype and shape of the operands, and of the results."""

_ARRAY = re.compile(r"\b([a-z]+\d+)\[([\d,]*)\]")
_HLO_DTYPE = {
    "float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "s32", "uint32": "u32",
    "int16": "s16", "int8": "s8", "uint8": "u8",
}  # fmt: skip


@dataclass(frozen=True)
class KernelSchedule:
    """One Pallas call of a step, and what is known of its time."""

    name: str
    """Of the kernel."""
    key: KernelKey
    """Shapes of its operands and results."""
    profile: CallProfile | None
    """Its static schedule; None where there is none."""
    unknown: str
    """Why there is none, or what makes it a bound; "" otherwise."""

    @property
    def seconds(self) -> float | None:
        """Modelled time of one call."""
        return None if self.profile is None else self.profile.time.total

    @property
    def source(self) -> str:
        """How the time came about."""
        if self.profile is None:
            return f"bound by bytes and FLOPs ({self.unknown})"
        source = "static schedule"
        if self.name in OWN_COPIES:
            source += " at random routing"
        return f"{source}, {self.unknown}" if self.unknown else source


def kernel_key(executed: Executed) -> KernelKey | None:
    """Of a Pallas call in a program, None for other instructions."""
    instruction = executed.instruction
    if instruction.custom_call_target != "tpu_custom_call":
        return None
    known = executed.computation.instructions
    operands = [known[name].shape for name in instruction.operands]
    return _arrays(" ".join(operands)), _arrays(instruction.shape)


def schedules(program: Program, lowerings: Iterable[Lowering]) -> list[KernelSchedule]:
    """One entry a distinct Pallas call of `program`; compiles each alone (seconds to minutes)."""
    candidates = known_calls(lowerings)
    found: dict[KernelKey, KernelSchedule] = {}
    for executed in program.executed():
        key = kernel_key(executed)
        if key is not None and key not in found:
            found[key] = _schedule(executed, key, candidates.get(key, ()))
    return list(found.values())


def known_calls(lowerings: Iterable[Lowering]) -> dict[KernelKey, list[PallasCall]]:
    """The Pallas calls of lowered functions on one device's shapes, by key; of calls with one key
    those whose bodies differ."""
    from train.compile.static.grid_steps import trace_calls

    calls: dict[KernelKey, dict[str, PallasCall]] = {}
    for lowering in lowerings:
        if lowering.target != "tpu":
            continue
        fn = functools.partial(lowering.fn, **dict(lowering.static), interpret=False)
        signature = lowering.local_signature
        mesh = () if lowering.sharding is None else lowering.sharding.mesh
        for call in trace_calls(fn, signature, assumed_routing(lowering.fn, signature), mesh):
            key = _described(call.signature), _described(call.results)
            calls.setdefault(key, {}).setdefault(str(call.params["jaxpr"]), call)
    return {key: list(found.values()) for key, found in calls.items()}


def _schedule(executed: Executed, key: KernelKey, calls: Sequence[PallasCall]) -> KernelSchedule:
    """Of calls that shapes do not tell apart, the first stands for all."""
    if not calls:
        name = executed.instruction.name
        return KernelSchedule(name, key, None, "no function of this project made it")
    call = calls[0]
    try:
        profile = profile_call(call)
    except (ValueError, RuntimeError) as error:
        return KernelSchedule(call.name, key, None, str(error).splitlines()[0][:200])
    caveats = [profile.caveat] if profile.caveat else []
    if len(calls) > 1:
        caveats.append(f"of one of {len(calls)} kernels with these shapes")
    return KernelSchedule(call.name, key, profile, ", ".join(caveats))


def assumed_routing(fn: Callable[..., Any], signature: Any) -> dict[int, np.ndarray]:
    """Values of those arguments that hold a routing, by position: of the rows or tokens of the
    first argument, each of which chooses at random."""
    names = list(inspect.signature(fn).parameters)[: len(signature)]
    shapes = {name: shape for name, (shape, _) in zip(names, signature, strict=True)}
    size = signature[0][0][0]
    values = {}
    if (shape := shapes.get("group_sizes")) is not None:
        values["group_sizes"] = np.broadcast_to(random_group_sizes(size, shape[-1]), shape)
    if "bounds" in shapes:
        lines, num_experts = shapes["bounds"]
        slots, top_k = shapes["position"]
        num_tokens = size // top_k if names[0] == "rows" else size
        values |= random_windows(num_tokens, top_k, num_experts, slots // (lines - 1))
    return {names.index(name): value for name, value in values.items()}


def _arrays(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(
        (dtype, tuple(int(dim) for dim in dims.split(",") if dim))
        for dtype, dims in _ARRAY.findall(text)
    )


def _described(signature: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((_HLO_DTYPE[dtype], tuple(shape)) for shape, dtype in signature)
