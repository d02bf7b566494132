"""Records the Triton kernels that the code itself starts, `kernel[grid](x, y, n)`, which need a GPU to run.

What such a kernel computes is not known, so one that is started is an operator of its own: it reads each tensor that it
gets, in full, and it is priced by these bytes alone. Autotuning and heuristics choose its constants; they start it once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from calibrate.capture.recorder import Recorder

NAMESPACE = "triton"


@contextmanager
def triton_kernels(recorder: Recorder, written: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Record the kernels that start within the block; without Triton there are none.

    `written`: is told each tensor that a kernel may have written.
    """
    if find_spec("triton") is None:
        yield
        return
    from triton.runtime.jit import KernelInterface

    def at(self: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: _start(recorder, written, self, (args, kwargs))

    def choose_none(self: Any, device: object) -> None:
        self.idx, self.prev_idx = -1, -1  # what torch makes of None: the tensors' device is the CPU here

    with patch.object(KernelInterface, "__getitem__", at), patch.object(torch.cuda.device, "__init__", choose_none):
        yield


def _start(recorder: Recorder, written: Callable[[torch.Tensor], None], kernel: Any, given: Any) -> None:
    tensors = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
    if not all(isinstance(x, FakeTensor) for x in tensors):
        raise NotImplementedError(f"a graph cannot hold the Triton kernel {_name(kernel)}, which its code starts")
    recorder.add(f"{NAMESPACE}.{_name(kernel)}", tensors, [])
    for x in tensors:
        written(x)


def _name(kernel: Any) -> str:
    """Return the name of a kernel's function; autotuning and heuristics hold it as `fn`."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", "kernel"))
