"""Answers what a script asks about fake floats: `if loss < best`, `if torch.isnan(loss)`, `if torch.rand(1) < 0.5`.

Each float that is read is `READ_AS`, so a comparison of single floats has the answer for that number. No float is NaN
or infinite, whatever the tensor's size. What depends on many floats in another way has no answer.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

READ_AS = 1.0
COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
JOINED: dict[str, Callable[[bool, bool], bool]] = {  # `mul` joins the halves of `torch.isfinite`
    "logical_and": operator.and_,
    "bitwise_and": operator.and_,
    "mul": operator.and_,
    "logical_or": operator.or_,
    "bitwise_or": operator.or_,
}
NEGATED = ("logical_not", "bitwise_not")
KEPT = ("any", "all", "view", "reshape", "squeeze", "unsqueeze", "detach", "alias", "clone", "_to_copy", "select")
NEVER = ("isnan", "isinf")


class Answers:
    """The one truth value that all elements of a fake tensor have, where it is known."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref[torch.Tensor], bool]] = {}  # by the tensor's id

    def of(self, x: Any) -> bool | None:
        """Return the value of all elements of `x`; None if it is unknown."""
        if isinstance(x, bool):
            return x
        found = self.known.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def see(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Remember the answer that an operator's result has."""
        if not isinstance(out, torch.Tensor) or out.dtype != torch.bool:
            return
        found = self._answer(func._schema.name.split("::")[1], args)
        if found is not None:
            key = id(out)
            self.known[key] = (weakref.ref(out, lambda _: self.known.pop(key, None)), found)

    def _answer(self, name: str, args: tuple[Any, ...]) -> bool | None:
        if name in NEVER:
            return False
        if name in COMPARED:
            return self._compared(name, *args[:2])
        known = [self.of(x) for x in args[:2]]
        if name in JOINED and None not in known:
            return JOINED[name](bool(known[0]), bool(known[1]))
        if name in NEGATED and known[0] is not None:
            return not known[0]
        return known[0] if name in KEPT else None

    def _compared(self, name: str, a: Any, b: Any) -> bool | None:
        if a is b or (isinstance(b, int | float) and not math.isfinite(b)):  # as `torch.isfinite` asks of any tensor
            return COMPARED[name](READ_AS, READ_AS if a is b else b)
        numbers = [_number(x) for x in (a, b)]
        return None if None in numbers else COMPARED[name](*numbers)


def _number(x: Any) -> float | None:
    """Return the number that a single float is read as."""
    if isinstance(x, torch.Tensor):
        return READ_AS if x.numel() == 1 and x.is_floating_point() else None
    return x if isinstance(x, int | float) else None


@contextmanager
def numbers_shown() -> Iterator[None]:
    """Let the text of a fake number be the number that `item` gives, as of a real one: `f"expert_{i}"`.

    Without a format an unknown integer is shown as the fake tensor that it is.
    """
    show = FakeTensor.__format__

    def formatted(self: FakeTensor, spec: str) -> str:
        if self.dim():
            return str(show(self, spec))
        try:
            return str(self.item().__format__(spec))
        except (DataDependentOutputException, ValueError):
            if spec:
                raise
            return str(show(self, spec))

    with patch.object(FakeTensor, "__format__", formatted):
        yield
