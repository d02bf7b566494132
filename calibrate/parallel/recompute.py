"""Activation recomputation: activations that a layer does not keep are computed again right before its backward.

- full: only a layer's input is kept, and the whole forward runs again (Chen et al. 2016, arXiv 1604.06174);
- selective_op: outputs of every other matmul (the first, third, …) and of fused attention are kept, and all other
  operators run again (torchtitan's selective "op" policy; torch's own `create_selective_checkpoint_contexts` does the
  same, but does not tell what it keeps);
- selective: queries, keys and values are kept, and the attention core runs again, whose inner tensors grow with the
  square of the sequence (Korthikanti et al. 2022, arXiv 2205.05198, section 5).

Dropout draws the same masks again, as torch's checkpoint restores the state of the random generator.

Documentation: docs/recompute.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from calibrate.bundled_model.model import Layer

ENTRY = {"full": ("forward",), "selective_op": ("forward",), "selective": ("core", "unfused")}  # methods that run again
MATMULS = ("aten::mm", "aten::addmm")
ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)
kept_watchers: list[Callable[[Tensor], object]] = []  # called with each output that selective_op keeps
_keeping = [False]


@contextmanager
def keeping() -> Iterator[None]:
    """Recompute nothing within the block, so that a backward can be timed without recomputation."""
    _keeping[0] = True
    try:
        yield
    finally:
        _keeping[0] = False


def recompute(blocks: Sequence[nn.Module], modes: Sequence[str]) -> None:
    """Let the layers among `blocks` recompute, each in its mode (none, selective, selective_op or full)."""
    for block, mode in zip(blocks, modes, strict=True):
        if isinstance(block, Layer) and mode != "none":
            for name in ENTRY[mode]:
                setattr(block, name, partial(_again, getattr(block, name), mode == "selective_op"))


def _again(function: Callable[..., Tensor], by_operator: bool, *inputs: Tensor) -> Tensor:
    """Call `function` and compute its inner tensors again in the backward; `by_operator` keeps some outputs."""
    if _keeping[0]:
        return function(*inputs)
    more: dict[str, Any] = {"context_fn": _kept_and_given_back} if by_operator else {}
    output: Tensor = checkpoint(function, *inputs, use_reentrant=False, **more)
    return output


def _kept_and_given_back() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the mode around a forward, which keeps outputs, and the mode around its second run, which returns them."""
    kept: list[Any] = []
    return _Operators(kept, again=False), _Operators(kept, again=True)


class _Operators(TorchDispatchMode):
    """Keeps outputs of a forward's operators by the policy, and in the second run returns them without computing."""

    def __init__(self, kept: list[Any], again: bool) -> None:
        super().__init__()
        self.kept, self.again, self.matmuls = kept, again, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._keeps(func._schema.name):
            return func(*args, **(kwargs or {}))
        if self.again:
            return tree_map_only(Tensor, torch.detach, self.kept.pop(0))
        out = func(*args, **(kwargs or {}))
        self.kept.append(tree_map_only(Tensor, torch.detach, out))
        for watch in kept_watchers:
            tree_map_only(Tensor, watch, out)
        return out

    def _keeps(self, name: str) -> bool:
        self.matmuls += name in MATMULS
        return name in ATTENTION or (name in MATMULS and self.matmuls % 2 == 1)
