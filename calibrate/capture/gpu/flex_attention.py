"""FlexAttention as one kernel forward and one backward, which torch has on a GPU alone.

The operators of this module stand in for the compiled kernels, and are never run. A kernel skips the blocks that the
block mask leaves out and computes the others whole (torch/_inductor/kernel/flex). So queries see as many keys in the
mean as are in these blocks: `k_seen` and `v_seen` are parts of the keys and values of that length. If nobody knows the
mask's values, queries see all keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, filterwarnings

import torch
import torch.nn.attention.flex_attention as of_torch
from torch.utils._python_dispatch import _disable_current_modes

from calibrate.capture.values.known_values import KnownValues

OPERATORS = torch.library.Library("calibrate", "FRAGMENT")
OPERATORS.define(
    "flex_attention(Tensor q, Tensor k, Tensor v, Tensor k_seen, Tensor v_seen) -> (Tensor out, Tensor lse)"
)
OPERATORS.define(
    "flex_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor k_seen, Tensor v_seen, Tensor out, "
    "Tensor lse) -> (Tensor of_q, Tensor of_k, Tensor of_v)"
)


def _outputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*q.shape[:-1], v.size(-1))
    out = torch.empty_like(q) if shape == q.shape else q.new_empty(shape)
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _like_inputs(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, grad: torch.Tensor, _: object) -> Any:
    return (*torch.ops.calibrate.flex_attention_backward(grad, *ctx.saved_tensors), None, None)


torch.library.register_fake("calibrate::flex_attention", _outputs)
torch.library.register_fake("calibrate::flex_attention_backward", _like_inputs)
torch.library.register_autograd("calibrate::flex_attention", _gradients, setup_context=_keep)


@contextmanager
def flex_attention_fused(known: KnownValues) -> Iterator[None]:
    """Let `flex_attention` run the operators of this module."""

    def fused(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: object, mask: Any, *more: object, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seen = max(1, round(k.size(-2) * _part(mask, known)))
        parts = (x.detach().narrow(-2, 0, min(seen, x.size(-2))) for x in (k, v))
        out, lse = torch.ops.calibrate.flex_attention(q, k, v, *parts)
        return out, lse, lse.detach()

    with (
        patch.object(of_torch, "flex_attention_hop", fused),
        patch.object(of_torch, "_validate_device", lambda *_: None),  # a CPU has no backward
        catch_warnings(),
    ):
        filterwarnings("ignore", "flex_attention called without torch.compile")  # it would not be fused; here it is
        yield


def _part(mask: Any, known: KnownValues) -> float:
    """Return the part of the blocks that the kernel computes; `mask`: what `BlockMask.as_tuple` returns.

    It holds the lengths of queries and keys, then for each row of blocks the number and places of those that are partly
    masked, and of those that are not masked.
    """
    _, _, counts, places, whole, *_ = mask
    found = [None if x is None else known.of(x) for x in (counts, whole)]
    if found[0] is None or (whole is not None and found[1] is None):
        return 1.0
    with _disable_current_modes():  # those of a trace, too
        total = sum(int(x.sum()) for x in found if x is not None)
    blocks: int = math.prod(counts.shape) * places.size(-1)
    return min(1.0, total / max(1, blocks))
