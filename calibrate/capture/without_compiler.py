"""Lets `torch.compile` in captured code do nothing; `--compile` captures what it fuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def without_compiler() -> Iterator[None]:
    """Run code eagerly that is compiled, or was when its module was imported.

    Dynamo would compile kernels for the CPU and run them on fake tensors, which have no memory.
    """

    def same(model: Any = None, **_: object) -> Any:
        return model if model is not None else lambda f: f

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "compile", same))
        stack.enter_context(patch.object(torch.nn.Module, "compile", lambda *_, **__: None))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
