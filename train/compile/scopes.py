"""Names a traced step's work by the file of this project that asked for it, backward passes too.

torch_xla writes a thread's current scope into the name of every HLO instruction made under it (with
XLA_HLO_DEBUG=1, see train/launch.py). A torch function mode sets the scope to the innermost frame
of ours; the gradient nodes that a call leaves behind set the same scope while they run, or, where
they are written in Python, the mode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import update_wrapper
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch_xla
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("torch_gemma4", "pallas_ops", "train")
RERUN = "rerun"
_push = torch_xla._XLAC.profiler.scope_pusher
"""Sets a scope of this thread for as long as the object that it returns lives."""


class Scopes(TorchFunctionMode):
    """Active in a `with`: calls of torch functions in this thread are named as above."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[Node] = set()
        self._files: dict[str, str | None] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = self._name(sys._getframe(1))
        if name is None:
            return func(*args, **(kwargs or {}))
        scope = _push(name)
        result = func(*args, **(kwargs or {}))
        del scope
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                self._mark(tensor.grad_fn, name)
        return result

    def around(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """The `body` of a recomputed layer with this mode active in the thread that runs it: the
        second run is in the autograd engine's. What that asks for lies in the scope RERUN."""

        def named(*args: Any) -> Any:
            # The first run is without gradients (torch_gemma4/recompute.py).
            scope = _push(RERUN) if torch.is_grad_enabled() else None
            with self:
                result = body(*args)
            del scope
            return result

        return update_wrapper(named, body)

    def _name(self, frame: FrameType | None) -> str | None:
        while frame is not None:
            file = frame.f_code.co_filename
            if file not in self._files:
                self._files[file] = _module(file)
            if self._files[file] is not None:
                return self._files[file]
            frame = frame.f_back
        return None

    def _mark(self, node: Node, name: str) -> None:
        """Names the nodes from `node` down to those that have a name."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node in self._seen:
                continue
            self._seen.add(node)
            waiting += [below for below, _ in node.next_functions if below is not None]
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                # Python runs in the engine's thread, where this mode is not active.
                node.register_prehook(self._enter)
                node.register_hook(self._leave)
            else:
                running: list[Any] = []
                node.register_prehook(lambda _, running=running: running.append(_push(name)))
                node.register_hook(lambda *_, running=running: running.clear())

    def _enter(self, _: Any) -> None:
        self.__enter__()

    def _leave(self, *_: Any) -> None:
        self.__exit__(None, None, None)


def _module(file: str) -> str | None:
    """Dotted name of a file of this project's packages, None for others and for this one."""
    path = Path(file)
    if file == __file__ or not path.is_relative_to(_ROOT):
        return None
    parts = path.relative_to(_ROOT).with_suffix("").parts
    return ".".join(parts) if parts[0] in _PACKAGES else None
