"""Loops over parameters at the end of a step, which issue each tensor's kernels by themselves."""

from __future__ import annotations

from typing import NamedTuple


class Loops(NamedTuple):
    """Say how a rank loops over tensors at the end of a step.

    `tensors`: over how many of them. `clips`: whether clipping is such a loop, too. `clipped`: the number of parameters
    whose gradients the rank clips; None: those that it updates.
    """

    tensors: int = 1
    clips: bool = False
    clipped: int | None = None


ONCE = Loops()
