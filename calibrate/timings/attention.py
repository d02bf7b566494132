"""Times causal attention, forward and backward: fused with every backend that the device has, and unfused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from calibrate.records import Record, point
from calibrate.timings.matmuls import DTYPES, Case, dtypes, shapes_as_in
from calibrate.timings.timing import Bench

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """The sizes of one attention."""

    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    head_dim: int

    @property
    def key(self) -> tuple[int, ...]:
        """The shape as `sim.core.program.Compute` writes it: causal, equal lengths and head sizes."""
        b, h, g, s, d = self
        return (b, h, g, s, s, d, d, 1)


def attention_cases(bench: Bench) -> list[Case]:
    """Return the measurements of attention, one for each dtype and shape."""
    return [
        Case(f"attention {dtype} {' '.join(map(str, shape))}", partial(_ways, dtype=dtype, shape=shape))
        for dtype in dtypes(bench)
        for shape in attention_shapes(shapes_as_in(bench, dtype))
    ]


def attention_shapes(bench: Bench) -> list[Shape]:
    """Return the shapes to measure: few for a quick run, and none whose scores would not fit."""
    if bench.device == "cpu":
        if bench.quick:
            return [Shape(1, 4, 4, 256, 64), Shape(2, 4, 4, 256, 64), Shape(1, 8, 8, 512, 64)]
        heads = ((2, 64), (4, 32), (4, 64), (8, 64), (8, 128))
        return [Shape(b, h, h, s, d) for b in (1, 2) for h, d in heads for s in (128, 256, 512, 1024)]
    if bench.quick:
        return [Shape(1, 32, 32, 2048, 128), Shape(1, 32, 8, 8192, 128)]
    groups, lengths = ((8, 8), (32, 32), (32, 8), (64, 8), (8, 1)), (1024, 2048, 4096, 8192, 16384)
    return [
        Shape(b, h, g, s, d)
        for b in (1, 4)
        for h, g in groups
        for s in lengths
        for d in (64, 128)
        if b * h * s * s <= 2**35
    ]


def backends(bench: Bench) -> tuple[str, ...]:
    """Return the names of torch's fused backends on this device; none on a CPU, where torch has only its default."""
    return () if bench.device == "cpu" else ("flash", "efficient", "cudnn")


class _Way(NamedTuple):
    """Calls of one implementation, ready to be timed; `op` has a placeholder for forward or backward."""

    op: str
    forward: list[Callable[[], object]]
    backward: list[Callable[[], object]]


def _ways(bench: Bench, dtype: str, shape: Shape) -> list[Record]:
    """Time every backend of `scaled_dot_product_attention` and unfused attention side by side.

    The backend "" is the one that torch picks; the simulator uses its times.
    """
    found = [_fused(bench, dtype, shape, backend) for backend in ("", *backends(bench))]
    ways = [way for way in (*found, _unfused(bench, dtype, shape)) if way is not None]
    times = bench.side_by_side([w.forward for w in ways]), bench.side_by_side([w.backward for w in ways])
    return [
        point(way.op.format(direction), dtype, shape.key, timing)
        for direction, column in zip(("forward", "backward"), times, strict=True)
        for way, timing in zip(ways, column, strict=True)
    ]


def _fused(bench: Bench, dtype: str, shape: Shape, backend: str) -> _Way | None:
    """Prepare one backend; None if it does not take this shape, dtype or device."""
    attention = partial(_sdpa, backend=backend, grouped=shape.kv_heads != shape.heads)
    suffix = f":{backend}" if backend else ""
    try:
        return _ready(bench, dtype, shape, attention, "attention_{}" + suffix)
    except RuntimeError as error:
        if "No available kernel" in str(error):
            return None
        raise


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: str, grouped: bool) -> Tensor:
    if not backend:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    which = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }[backend]
    with sdpa_kernel(which):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _unfused(bench: Bench, dtype: str, shape: Shape) -> _Way | None:
    """Prepare batched matmul, mask, softmax and batched matmul as one; the simulator prices them one by one."""
    s = shape.seq_len
    if shape.kv_heads != shape.heads or shape.batch * shape.heads * s * s > 2**30:
        return None  # probabilities alone would take many gigabytes
    mask = torch.ones(s, s, dtype=torch.bool, device=bench.device).triu(1)
    attention = partial(_by_parts, mask=mask, scale=shape.head_dim**-0.5)
    return _ready(bench, dtype, shape, attention, "attention_unfused_{}")


def _by_parts(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * scale
    return scores.masked_fill(mask, float("-inf")).softmax(-1) @ v


def _ready(bench: Bench, dtype: str, shape: Shape, attention: Attention, op: str) -> _Way:
    b, heads, kv_heads, s, d = shape
    forward: list[Callable[[], object]] = []
    backward: list[Callable[[], object]] = []
    size = torch.finfo(DTYPES[dtype]).bits // 8
    for _ in range(min(4, bench.copies(size * b * s * d * (2 * heads + 2 * kv_heads)))):
        q, k, v = (
            torch.randn(b, h, s, d, device=bench.device, dtype=DTYPES[dtype], requires_grad=True)
            for h in (heads, kv_heads, kv_heads)
        )
        out = attention(q, k, v)
        forward.append(partial(attention, q, k, v))
        grad = torch.randn_like(out)
        backward.append(partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True))
    return _Way(op, forward, backward)
