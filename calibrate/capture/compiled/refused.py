"""Why compiled code cannot be captured as one graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class NotOneGraph(ValueError):
    """A graph of the code would have other kernels than the code; the message says why."""


class NotAnInput(NotOneGraph):
    """The code uses `tensors` that need gradients and are none of its arguments, so no gradient would be computed."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__("it uses parameters of modules that it does not call")
        self.tensors = tensors
