"""Lets function modes see the Python code that a backward runs: recomputed forwards, and backwards of one's own.

torch enters a backward through the modes (torch/autograd/__init__.py: `handle_torch_function`), and a mode is off while
it handles a call. So what autograd's engine calls would run as on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

ENGINE = "_engine_run_backward"


@contextmanager
def kept_in_backward(*modes: TorchFunctionMode) -> Iterator[None]:
    """Enter modes, in this order, whenever autograd's engine runs and they are off."""
    run = getattr(torch.autograd, ENGINE)

    def with_modes(*args: Any, **kwargs: Any) -> Any:
        on = {id(m) for m in _get_current_function_mode_stack()}
        with ExitStack() as stack:
            for mode in modes:
                if id(mode) not in on:
                    stack.enter_context(mode)
            return run(*args, **kwargs)

    with patch.object(torch.autograd, ENGINE, with_modes):
        yield
