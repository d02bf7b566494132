"""Knows which module runs, in the forward and in the backward."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


@dataclass(slots=True)
class Modules:
    """Knows which module runs: in the forward by hooks, in the backward by the number of autograd's node.

    Autograd numbers its nodes in the order in which the forward makes them. So the module of every node is the one that
    ran when its number was given.
    """

    names: dict[int, str]
    stack: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def enter(self, module: torch.nn.Module, _: object) -> None:
        """Note that a module's forward begins; a hook."""
        self.stack.append(self.names.get(id(module), self.path))
        self._mark(self.path)

    def leave(self, module: torch.nn.Module, *_: object) -> None:
        """Note that a module's forward has ended or failed; a hook."""
        if self.stack:
            self.stack.pop()
        self._mark(self.path)

    @property
    def path(self) -> str:
        """Return the path of the innermost module whose forward runs."""
        return self.stack[-1] if self.stack else ""

    def see(self, path: str) -> None:
        """Note that nodes made from now on are of this module: those of a function that is recomputed."""
        if not self.paths or self.paths[-1] != path:
            self._mark(path)

    def _mark(self, path: str) -> None:
        self.numbers.append(torch._C._autograd._get_sequence_nr())
        self.paths.append(path)

    def of_node(self) -> str | None:
        """Return the module of the node that autograd runs; None if it runs no recorded node."""
        node = torch._C._current_autograd_node()
        if node is None or node.name() == "torch::autograd::AccumulateGrad":
            return None
        i = bisect_right(self.numbers, node._sequence_nr()) - 1
        return self.paths[i] if i >= 0 else None


@contextmanager
def module_hooks(enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Call `enter` before and `leave` after each forward of any module, even if it raises."""
    handles: list[Any] = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def watched(modules: Modules) -> AbstractContextManager[object]:
    """Let `modules` know which one runs."""
    return module_hooks(modules.enter, modules.leave)
