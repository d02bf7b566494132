"""A method whose results are kept in its object."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def cached(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Keep a method's results by its arguments, for as long as its object lives.

    `functools.cache` on a method would keep every object for as long as the class lives. Arguments that compare by
    identity stay alive in the keys, so none is taken for another. Pass them by position.
    """
    name = f"{method.__name__} by arguments"

    @wraps(method)
    def kept(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # In the object's own `__dict__`: a cache goes when its object does, and frozen Structs with a dict allow it.
        results: dict[Hashable, Result] = vars(self).setdefault(name, {})
        # Not `get`: None may be a result.
        if args not in results:
            results[args] = method(self, *args, **kwargs)
        return results[args]

    return kept
