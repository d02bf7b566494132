"""Tells which products of fp32 numbers torch rounds to tf32 on a GPU.

cuDNN's convolutions and recurrent layers do by default, cuBLAS's matmuls do not (aten/src/ATen/Context.h:
`fp32_precision`; torch.backends.cudnn.allow_tf32 is true, torch.backends.cuda.matmul.allow_tf32 false). The captured
code may set both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sim.inputs.program_file import CONVOLUTIONS, CUDNN_RECURRENT

MATMULS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")


def rounds_to_tf32(name: str, inputs: Sequence[tuple[Any, int]]) -> bool:
    """Return whether a GPU that has tf32 computes an operator in it; `inputs`: as `RecordedOperator` has them."""
    cudnn, cublas = torch.backends.cudnn, torch.backends.cuda.matmul
    if name in CONVOLUTIONS:
        allowed = _allows(getattr(cudnn, "conv", None), cudnn)
    elif name in CUDNN_RECURRENT:
        allowed = _allows(getattr(cudnn, "rnn", None), cudnn)
    else:
        allowed = name in MATMULS and _allows(cublas, cublas)
    return allowed and any(tensor[0] == "fp32" for tensor, _ in inputs)


def _allows(setting: Any, before: Any) -> bool:
    """Read a setting of torch 2.9 and later; `before`: what holds the switch of earlier ones."""
    precision = getattr(setting, "fp32_precision", None)
    return bool(before.allow_tf32) if precision is None else precision == "tf32"
