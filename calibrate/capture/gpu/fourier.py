"""Fourier transforms as a GPU runs them: a sweep for each dimension, and a product where the result is scaled.

torch gives cuFFT up to three dimensions at once (ATen/native/cuda/SpectralOps.cpp: `_fft_r2c_cufft` and its like) and
scales the result afterwards (`_fft_apply_normalization`). cuFFT transforms one dimension after the other.
"""

from __future__ import annotations

from typing import Any

import torch

C2C, R2C, C2R = (getattr(torch.ops.aten, f"_fft_{kind}").default for kind in ("c2c", "r2c", "c2r"))


def is_of_several_steps(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a transform is of several dimensions or scaled; its arguments: tensor, dimensions, scaling, …."""
    return func in (C2C, R2C, C2R) and (len(args[1]) > 1 or bool(args[2]))


def step_by_step(func: Any, x: torch.Tensor, dims: list[int], scaling: int, last: Any) -> torch.Tensor:
    """Run a transform of one dimension after the other. `last`: the operator's last argument."""
    first, others = dims[-1], dims[:-1]
    if func is R2C:
        out: torch.Tensor = R2C(x, [first], 0, last)
        forward = True
    else:
        out, forward = x, bool(func is C2C and last)
        others = dims if func is C2C else others
    for dim in reversed(others):
        out = C2C(out, [dim], 0, forward)
    if func is C2R:
        out = C2R(out, [first], 0, last)
    if scaling:
        out.mul_(1.0)
    return out
