"""Loops over parameters at the end of a step, which issue each tensor's kernels by themselves."""

from __future__ import annotations

from typing import NamedTuple


class Loops(NamedTuple):
    """Hold over how many tensors a rank loops, and whether clipping does, too, where an optimizer does. `clipped`: the
    parameters whose gradients a rank clips, if they are not those that it updates (None)."""

    tensors: int = 1
    clips: bool = False
    clipped: int | None = None


ONCE = Loops()
