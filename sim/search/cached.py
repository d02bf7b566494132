"""Cache a method's results in its object."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def cached(method: Callable[Concatenate[Owner, Arguments], Result]) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Cache a method's results by its arguments, for as long as its object lives.

    `functools.cache` on a method would keep every object alive for as long as the class. The keys keep arguments alive,
    so two arguments that compare by identity are never confused. Pass arguments by position.
    """
    name = f"{method.__name__} by arguments"

    @wraps(method)
    def kept(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # The object's own `__dict__` goes when the object does, and frozen Structs with `dict=True` have one.
        results: dict[Hashable, Result] = vars(self).setdefault(name, {})
        # `get` cannot tell a missing result from None, which may be a result.
        if args not in results:
            results[args] = method(self, *args, **kwargs)
        return results[args]

    return kept
