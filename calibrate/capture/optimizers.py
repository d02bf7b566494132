"""Lets optimizers run on fake tensors of the CPU as they do on a GPU's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch.optim  # noqa: F401  # its modules are looked up

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
