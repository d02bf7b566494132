"""Activation recomputation: what a layer does not keep for its backward is computed again just before.

- full: of a layer only its input is kept, the whole forward runs again (Chen et al. 2016, arXiv 1604.06174);
- selective: query, key and value are kept and the attention core runs again, whose inner tensors grow with
  the square of the sequence (Korthikanti et al. 2022, arXiv 2205.05198, section 5).

Dropout draws the same masks again: torch's checkpoint restores the state of the random generator.

Beside it: docs/recompute.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from calibrate.model import Layer

ENTRY = {"full": ("forward",), "selective": ("core", "unfused")}  # the methods that run again
_keeping = [False]


@contextmanager
def keeping() -> Iterator[None]:
    """Keep everything meanwhile: to time a backward without its recomputation."""
    _keeping[0] = True
    try:
        yield
    finally:
        _keeping[0] = False


def recompute(blocks: Sequence[nn.Module], modes: Sequence[str]) -> None:
    """Have the layers among `blocks` recompute, each in its mode (none, selective or full)."""
    for block, mode in zip(blocks, modes, strict=True):
        if isinstance(block, Layer) and mode != "none":
            for name in ENTRY[mode]:
                setattr(block, name, partial(_again, getattr(block, name)))


def _again(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call `function`; its inner tensors are not kept but made again in backward."""
    if _keeping[0]:
        return function(*inputs)
    out: Tensor = checkpoint(function, *inputs, use_reentrant=False)
    return out
