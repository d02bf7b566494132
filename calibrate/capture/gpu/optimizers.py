"""Lets optimizers and clipping run on fake tensors of the CPU as they do on a GPU's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from unittest.mock import patch

import torch.optim  # noqa: F401  # its modules are looked up
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torchs
from torch.utils import _foreach_utils

MANY_AT_ONCE = _foreach_utils._foreach_supported_types  # what torch clips with one kernel for many tensors
SUPPORTED = "_get_capturable_supported_devices"


@contextmanager
def capturable_here() -> Iterator[None]:
    """Let `capturable=True` be given, which keeps all state on the device, as a CUDA graph needs.

    torch asks for parameters on a GPU (torch/optim/optimizer.py, `_get_capturable_supported_devices`).
    """
    modules = [m for name, m in sys.modules.items() if name.startswith("torch.optim.") and hasattr(m, SUPPORTED)]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, SUPPORTED, lambda *_, **__: ["cpu", "cuda"]))
        yield


@contextmanager
def kernels_of_gpu(on_gpu: Callable[[], bool]) -> Iterator[None]:
    """Let torch's optimizers choose kernels for many tensors (`foreach`) as they do for parameters on a GPU.

    Each optimizer decides by itself: Adafactor and Adam with a tensor as its learning rate take parameters one by one
    (torch/optim/optimizer.py, `_default_to_fused_or_foreach`; _adafactor.py, `adafactor`; adam.py, `adam`).
    """
    devices, kinds = _foreach_utils._get_foreach_kernels_supported_devices, torchs._foreach_supported_types
    with (
        patch.object(torchs, devices.__name__, lambda: [*devices(), "cpu"] if on_gpu() else devices()),
        patch.object(torchs, "_foreach_supported_types", [*kinds, FakeTensor]),
    ):
        yield


def many_at_once() -> AbstractContextManager[object]:
    """Let torch clip many fake tensors with one kernel, as it does real ones (torch/nn/utils/clip_grad.py)."""
    return patch.object(_foreach_utils, "_foreach_supported_types", [*MANY_AT_ONCE, FakeTensor])
