"""Count what torch's own operators read and write, and how many of them run."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FREE = ("detach", "empty", "new_empty", "empty_like")


class Accesses(TorchDispatchMode):
    """Elements and bytes that operators read and write, and how many ran; views are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.bytes = self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        made, read = _tensors(out), _tensors((args, kwargs))
        stores = {t.untyped_storage().data_ptr() for t in read}
        view = not name.endswith("_") and any(t.untyped_storage().data_ptr() in stores for t in made)
        if name in FREE or view:
            return out
        self.elements += sum(t.numel() for t in (*made, *read))
        self.bytes += sum(t.numel() * t.element_size() for t in (*made, *read))
        self.operators += 1
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def counted(work: Any) -> tuple[Any, Accesses]:
    """The result of `work()` and its accesses."""
    with Accesses() as found:
        out = work()
    return out, found
