"""Operators of torch without a kernel of their own, which call others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

# On a CPU and a GPU (native_functions.yaml: their dispatch is CompositeExplicitAutograd).
CALLS_OTHERS = frozenset(
    f"aten::{name}"
    for name in (
        *("_euclidean_dist", "rot90", "celu", "celu_", "_safe_softmax", "masked_fill", "dist", "block_diag"),
        *("affine_grid_generator", "allclose", "conv_tbc", "_trilinear"),
    )
)
NON_FUNCTIONAL = "CompositeExplicitAutogradNonFunctional"  # the other key of such operators
# Operators with a kernel on a GPU alone; a torch that was built without CUDA knows them as calls of others.
KERNELS_OF_CUDA = ("aten::_fused_rms_norm", "aten::_fused_rms_norm_backward")


def calls_of(func: Any, device: str) -> Callable[..., Any] | None:
    """Return what runs the operators that `func` calls on a device; None if it has a kernel of its own there."""
    name = func._schema.name
    if is_composite(func) and not (device != "cpu" and name in KERNELS_OF_CUDA):
        run: Callable[..., Any] = func.decompose
        return run
    return explicit_calls_of(func)


def explicit_calls_of(func: Any) -> Callable[..., Any] | None:
    """Return what runs the operators that `func` calls below autograd; None for all but `CALLS_OTHERS`."""
    if func._schema.name not in CALLS_OTHERS:
        return None
    keys = torch._C.DispatchKey
    other = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), NON_FUNCTIONAL)
    key = keys.CompositeExplicitAutogradNonFunctional if other else keys.CompositeExplicitAutograd
    return partial(func._op_dk, key)


@cache
def is_composite(func: Any) -> bool:
    """Return whether an operator only calls others, with no kernel of its own; in inference mode torch shows it so."""
    if func.namespace != "aten" or not func._can_decompose():
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return not any(has_kernel(func.name(), key) for key in ("CPU", "CUDA", "CompositeExplicitAutograd"))
