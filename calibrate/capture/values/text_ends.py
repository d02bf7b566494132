"""Answers whether texts have ended, as loops that generate tokens ask: `if (token == eos).all()`, `if token == eos`.

An unknown token is not the one that ends a text. This is said where code asks for all texts, or for the only one.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

COMPARED = {"eq": False, "ne": True}  # a token with the number of another one
JOINED: dict[str, Callable[[bool, bool], bool]] = {
    **dict.fromkeys(("logical_and", "bitwise_and", "mul"), operator.and_),
    **dict.fromkeys(("logical_or", "bitwise_or"), operator.or_),
}
WHOLE = (torch.int64, torch.int32)
NEGATED = ("logical_not", "bitwise_not")
KEPT = ("clone", "_to_copy", "max", "min")


class TextEnds:
    """The answer that all elements of a fake tensor have; `known`: the one number that a tensor is filled with."""

    def __init__(self, known: Callable[[torch.Tensor], bool | int | float | None]) -> None:
        self.known = known
        self._found: dict[int, bool] = {}  # by address of a living storage

    def of(self, x: Any) -> bool | None:
        """Return the answer of all elements; None if there is none."""
        return self._found.get(x.untyped_storage()._cdata) if isinstance(x, torch.Tensor) else None

    def note(self, out: torch.Tensor | tuple[torch.Tensor, ...], answer: bool) -> None:
        """Remember the answer that all elements of a result have, of several results the first (`max` along a row)."""
        storage = (out[0] if isinstance(out, tuple) else out).untyped_storage()
        if storage._cdata not in self._found:
            weakref.finalize(storage, self._found.pop, storage._cdata, None)
        self._found[storage._cdata] = answer

    def answer(self, name: str, args: tuple[Any, ...]) -> bool | None:
        """Return the answer that all elements of an operator's result have, before it runs; None if there is none."""
        name = name.removesuffix("_")
        if name in COMPARED:
            return self._compared(name, *args[:2])
        if name == "isin":
            return False if isinstance(args[0], torch.Tensor) and args[0].dtype in WHOLE else None
        if name in KEPT:
            return self.of(args[0])
        if name in NEGATED:
            found = self.of(args[0])
            return None if found is None else not found
        if name not in JOINED or None is self.of(args[0]) is self.of(args[1]):
            return None
        values = [self._value(x) for x in args[:2]]
        return None if None in values else JOINED[name](bool(values[0]), bool(values[1]))

    def _compared(self, name: str, x: Any, other: Any) -> bool | None:
        """Compare tokens, or answers, with a number. A single number that is neither may be a count of texts."""
        if not isinstance(x, torch.Tensor) or not isinstance(other, int):
            return None
        found = self.of(x)
        if found is not None:
            return (int(found) == int(other)) != COMPARED[name]
        return COMPARED[name] if x.dtype in WHOLE and x.dim() else None

    def _value(self, x: Any) -> bool | int | float | None:
        found = self.of(x)
        return found if found is not None or not isinstance(x, torch.Tensor) else self.known(x)

    def forget(self, x: torch.Tensor) -> None:
        """Note that a tensor was written with other values."""
        self._found.pop(x.untyped_storage()._cdata, None)
