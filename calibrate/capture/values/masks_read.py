"""Lets Transformers read masks whose values are known, as it reads them in a real run.

Its models leave out a mask that hides nothing, because attention without a mask has a faster kernel. They read the mask
to find that out, but never a fake one, which they take for the sign of a traced graph (`is_tracing` in
transformers/utils/import_utils.py).
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from torch._subclasses.fake_tensor import FakeTensor

from calibrate.capture.values.known_values import KnownValues

MODULE = "transformers.utils.import_utils"


def masks_read(known: KnownValues) -> AbstractContextManager[object]:
    """Call only those tensors fake whose values are unknown; without Transformers do nothing."""

    def is_unknown(x: Any) -> bool:
        return isinstance(x, FakeTensor) and not known.knows(x)

    return _patched("is_fake_tensor", is_unknown)


def masks_kept() -> AbstractContextManager[object]:
    """Let no mask be read, as in a graph that `torch.compile` traces; without Transformers do nothing."""
    return _patched("is_torchdynamo_compiling", lambda: True)


def _patched(name: str, function: Any) -> AbstractContextManager[object]:
    module = sys.modules.get(MODULE)
    return patch.object(module, name, function) if hasattr(module, name) else nullcontext()
