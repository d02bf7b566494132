"""Arguments of an operator's call that decide how long its kernels take, beside its tensors."""

from __future__ import annotations

import math
from typing import Any

from sim.models.captured.softmaxes import SOFTMAXES

ALONG = (  # operators whose kernels depend on the dimension that they go along
    *("aten.cumsum", "aten.cumsum_", "aten.cumprod", "aten.logcumsumexp", "aten.cummax", "aten.cummin"),
    *("aten.sort", "aten.argsort", "aten.topk", "aten.kthvalue", "aten.median", "aten.nanmedian"),
    *SOFTMAXES,
)
POOLS = ("aten.max_pool2d_with_indices", "aten.max_pool2d_with_indices_backward")


def argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Return an argument of an operator's call; None if the operator has none of the name, or has its default."""
    for i, given in enumerate(func._schema.arguments):
        if given.name == name:
            return kwargs.get(name, args[i] if i < len(args) else None)
    return None


def dims_behind(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return how many dimensions lie behind the one that an operator goes along, by default the last; 0 of others."""
    if name not in ALONG:
        return 0
    dim = argument(func, args, kwargs, "dim")
    count = args[0].dim()
    return 0 if dim is None or not count else int(count - 1 - dim % count)


def window(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the places of a pool's window of two dimensions, of which one size is that of both; 0 of others."""
    if name not in POOLS:
        return 0
    sizes = argument(func, args, kwargs, "kernel_size")
    return math.prod(sizes if len(sizes) > 1 else (*sizes, *sizes))
