"""Tells which additions of gradients autograd's engine makes in place.

A tensor that several operators read gets a gradient from each. The engine adds a later one into the memory of the first
if nothing else refers to that (torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`). Under a dispatch mode
it makes a new tensor instead, because a mode may give tensors another meaning.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.autograd import graph
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ADD, ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
BETWEEN = (  # Python that runs between the engine and this module
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
    "calibrate/capture/recorder.py",
    "calibrate/capture/script_recorder.py",
)


class GradientSums(TorchDispatchMode):
    """Knows the number of references to a gradient that the engine alone holds, as a dispatch mode counts them.

    Those of the dispatch itself are among them, and torch's version decides how many they are. So they are counted in a
    small backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.references = (0, 0)
        with _disable_current_modes(), torch.enable_grad(), self:
            x = torch.zeros(1, requires_grad=True).sin()
            torch.autograd.backward(x.cos() * x.exp(), torch.ones(1))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ADD:
            self.references = _references(args[0])
        return func(*args, **(kwargs or {}))

    def in_place(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether an operator of a recorder is the engine's addition into memory that it alone holds."""
        if func is not ADD or torch.is_grad_enabled() or not _called_by_engine(sys._getframe(1)):
            return False
        first, second = args[:2]
        tensors = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
        return tensors and _is_dense(first) and _references(first) == self.references


def _called_by_engine(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.endswith(BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_code is graph._engine_run_backward.__code__


def _references(x: torch.Tensor) -> tuple[int, int]:
    """Return the references to a tensor, and to its storage."""
    return x._use_count(), torch._C._storage_Use_Count(x.untyped_storage()._cdata)


def _is_dense(x: torch.Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps and overlaps, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(pair for pair in zip(x.stride(), x.shape, strict=True) if pair[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True
