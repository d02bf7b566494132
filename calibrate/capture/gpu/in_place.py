"""Runs operators of a backward in place where torch does so when nobody watches.

Under a dispatch mode torch's own code makes a new tensor for some results, because a mode may give tensors another
meaning (`isTensorSubclassLike`):

- A tensor that several operators read gets a gradient from each. The engine adds a later one into the memory of the
  first if nothing else refers to that (torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`).
- The gradient of a tensor of which parts were read is written into zeros (torch/csrc/autograd/FunctionsManual.cpp:
  `index_backward`, `value_selecting_reduction_backward`; aten/src/ATen/native: `gather_backward`).
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.autograd import graph
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

ADD, ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
ZEROS = (torch.ops.aten.new_zeros.default, torch.ops.aten.zeros_like.default)
INTO_ZEROS = {
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.put.default: torch.ops.aten.put_.default,
}
BETWEEN = (  # Python that runs between the engine and this module
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
    "calibrate/real_steps/operator_times.py",
    "calibrate/capture/recorder.py",
    "calibrate/capture/script/recorder.py",
)


class InPlace(TorchDispatchMode):
    """Chooses the operators in place; `references`: to a gradient that the engine alone holds, as a mode counts them.

    Those of the dispatch itself are among them, and torch's version decides how many they are. So they are counted in a
    small backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.references = (0, 0)
        self._zeros = 0  # address of the storage that the last operator filled with zeros
        with _disable_current_modes(), torch.enable_grad(), self:
            x = torch.zeros(1, requires_grad=True).sin()
            torch.autograd.backward(x.cos() * x.exp(), torch.ones(1))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ADD:
            self.references = _references(args[0])
        return func(*args, **(kwargs or {}))

    def form(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the operator to run for one that another mode's `__torch_dispatch__` got."""
        if (func is not ADD and func not in INTO_ZEROS) or not isinstance(args[0], torch.Tensor):
            return func
        if torch.is_grad_enabled() or not _called_by_engine(sys._getframe(1)):
            return func
        if func in INTO_ZEROS:
            return INTO_ZEROS[func] if args[0].untyped_storage()._cdata == self._zeros else func
        alone = isinstance(args[1], torch.Tensor) and _is_dense(args[0]) and _references(args[0]) == self.references
        return ADD_IN_PLACE if alone else func

    def ran(self, func: Any, out: Any) -> None:
        """Note an operator that has run, and its result."""
        self._zeros = out.untyped_storage()._cdata if func in ZEROS else 0


def _called_by_engine(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.endswith(BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_code is graph._engine_run_backward.__code__


def _references(x: Any) -> tuple[int, int]:
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
