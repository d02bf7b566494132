"""Triton kernels as other people write them; Triton reads their text from this file."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 512})], key=["n"])
@triton.jit
def gate(x_ptr: Any, gate_ptr: Any, out_ptr: Any, n: Any, BLOCK: tl.constexpr) -> None:
    """Multiply by a gate."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < n)
    tl.store(out_ptr + places, x * tl.load(gate_ptr + places, mask=places < n), mask=places < n)


@triton.jit
def scale_(x_ptr: Any, counts_ptr: Any, n: Any, BLOCK: tl.constexpr) -> None:
    """Double in place, row by row, and count."""
    x_ptr += tl.program_id(0) * n
    for start in range(0, n, BLOCK):
        places = start + tl.arange(0, BLOCK)
        tl.store(x_ptr + places, tl.load(x_ptr + places, mask=places < n) * 2, mask=places < n)
    tl.atomic_add(counts_ptr, 1)


class Gated(torch.autograd.Function):
    """Its backward works in place on the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Start a kernel that is tuned."""
        ctx.save_for_backward(gates)
        out = torch.empty_like(x)
        with torch.cuda.device(x.device):
            gate[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, gates, out, n=x.numel())
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Start a kernel without results."""
        grad = grad.contiguous()
        counts = torch.zeros(1, dtype=torch.int32)
        scale_[(grad.size(0),)](grad, counts, grad.size(1), BLOCK=128)
        return grad, None


@triton.jit
def put(out_ptr: Any, x: Any) -> None:
    """Store, as a function that kernels call."""
    tl.store(out_ptr, x)


@triton.jit
def choose(x_ptr: Any, places_ptr: Any, out_ptr: Any, counts_ptr: Any, BLOCK: tl.constexpr) -> None:
    """Gather rows by whole numbers; addresses have several names, and a function stores."""
    source, target = x_ptr, out_ptr
    places = tl.load(pointer=places_ptr + tl.arange(0, BLOCK))
    put(target + tl.arange(0, BLOCK), tl.load(source + places))
    tl.store(pointer=counts_ptr, value=BLOCK)
