"""Which batch norms torch gives to cuDNN on a GPU; it runs the others in kernels of its own.

native/Normalization.cpp: _select_batch_norm_backend, _batch_norm_impl_index_backward. A norm without weights
(`affine=False`), or with running means that it does not update, has no kernel of cuDNN for its backward.
"""

from __future__ import annotations

from typing import Any

import torch

from calibrate.capture.arguments import argument

FORWARD, BACKWARD = "aten.native_batch_norm", "aten.native_batch_norm_backward"
MOST_IMAGES = {True: 880801, False: 65535}  # of cuDNN, in training or not
MOST_ELEMENTS = 2**31 - 1


def batch_norm(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the operator that torch calls on a GPU for one that it calls on a CPU; others keep their names."""
    if name not in (FORWARD, BACKWARD):
        return name
    backward = name == BACKWARD
    x, weight, mean = (argument(func, args, kwargs, word) for word in ("input", "weight", "running_mean"))
    training = bool(argument(func, args, kwargs, "train" if backward else "training"))
    taken = (
        weight is not None
        and _takes_dtypes(x.dtype, weight.dtype)
        and (training or (mean is not None and not backward))
        and x.dim() > 2
        and x.shape[0] <= MOST_IMAGES[training]
        and x.numel() <= MOST_ELEMENTS
    )
    return name.replace("native", "cudnn") if taken and torch.backends.cudnn.enabled else name


def _takes_dtypes(x: torch.dtype, weight: torch.dtype) -> bool:
    if torch.bfloat16 in (x, weight):
        return False
    return x is not torch.float16 or weight is torch.float32
