"""Cases of `tools/gpu_kernels.py`: single operators of torch by shape and dtype, each made when it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = {BF16: "bf16", FP32: "fp32"}
Case = tuple[str, Callable[[], Callable[[], Any]]]


class Maker:
    """Makes random tensors on a device; `small` shrinks the first size of each."""

    def __init__(self, device: str, small: bool) -> None:
        self.device, self.small = device, small

    def __call__(self, *shape: int, dtype: torch.dtype = BF16, grad: bool = True, last: bool = False) -> Tensor:
        first = max(1, min(shape[0], 2)) if self.small else shape[0]
        x = torch.randn(first, *shape[1:], device=self.device, dtype=dtype)
        if last:
            x = x.to(memory_format=torch.channels_last)
        return x.requires_grad_(grad)


def both(forward: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], None]:
    """Return a forward and backward of inputs, whose gradients are dropped."""
    gradient = torch.randn_like(forward(*inputs))
    wanted = [x for x in inputs if x.requires_grad]

    def run() -> None:
        torch.autograd.grad(forward(*inputs), wanted, gradient)

    return run


def trained(
    new: Maker, function: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> Callable[[], None]:
    """Return a forward and backward of a function of one tensor."""
    return both(function, new(*shape, dtype=dtype))


def applied(
    new: Maker, function: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> Callable[[], Any]:
    """Return a call of a function of one tensor, without gradients."""
    return partial(function, new(*shape, dtype=dtype, grad=False))


def norms(new: Maker) -> Iterator[Case]:
    """Layer norms and RMS norms of rows from 64 to 16,384 numbers."""
    for dtype in (BF16, FP32):
        for width in (64, 96, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384):
            rows = 2**25 // width

            def layer(rows: int = rows, width: int = width, dtype: torch.dtype = dtype) -> Callable[[], None]:
                weight, bias = (torch.ones(width, device=new.device, dtype=dtype).requires_grad_() for _ in range(2))
                return both(
                    lambda x, w, b: F.layer_norm(x, (width,), w, b), new(rows, width, dtype=dtype), weight, bias
                )

            def rms(rows: int = rows, width: int = width, dtype: torch.dtype = dtype) -> Callable[[], None]:
                weight = torch.ones(width, device=new.device, dtype=dtype).requires_grad_()
                return both(lambda x, w: F.rms_norm(x, (width,), w, 1e-5), new(rows, width, dtype=dtype), weight)

            yield f"layer_norm {SIZES[dtype]} {rows}x{width}", layer
            if width in (128, 1024, 4096):
                yield f"rms_norm {SIZES[dtype]} {rows}x{width}", rms


IMAGES = ((64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7))


def images(new: Maker) -> Iterator[Case]:
    """Batch norms and pools of images [images, channels, width, width]."""
    for last in (False, True):
        for channels, width in IMAGES:
            for dtype in (BF16, FP32):

                def batch(
                    c: int = channels, w: int = width, dtype: torch.dtype = dtype, last: bool = last
                ) -> Callable[[], None]:
                    weight, bias = (torch.ones(c, device=new.device).requires_grad_() for _ in range(2))
                    mean, var = (torch.ones(c, device=new.device) for _ in range(2))
                    return both(
                        lambda x, a, b: F.batch_norm(x, mean, var, a, b, training=True),
                        new(128, c, w, w, dtype=dtype, last=last),
                        weight,
                        bias,
                    )

                yield f"batch_norm {SIZES[dtype]} {'last' if last else 'first'} 128x{channels}x{width}", batch

        def pool(last: bool = last) -> Callable[[], None]:
            return both(lambda x: F.max_pool2d(x, 3, 2, 1), new(128, 64, 112, 112, last=last))

        yield f"max_pool {'last' if last else 'first'} 128x64x112", pool


# input channels, output channels, width, filter, stride, groups
CONVOLUTIONS = (
    (3, 64, 224, 7, 2, 1), (64, 64, 56, 1, 1, 1), (64, 64, 56, 3, 1, 1), (64, 256, 56, 1, 1, 1), (256, 64, 56, 1, 1, 1),
    (128, 128, 56, 3, 2, 1), (128, 128, 28, 3, 1, 1), (512, 128, 28, 1, 1, 1), (256, 256, 14, 3, 1, 1),
    (1024, 256, 14, 1, 1, 1), (256, 512, 56, 1, 2, 1), (512, 512, 7, 3, 1, 1), (2048, 512, 7, 1, 1, 1),
    (3, 1024, 224, 14, 14, 1), (3, 768, 224, 16, 16, 1), (3, 128, 224, 4, 4, 1), (128, 256, 56, 2, 2, 1),
    (128, 128, 56, 7, 1, 128), (256, 256, 28, 7, 1, 256), (512, 512, 14, 7, 1, 512), (128, 128, 56, 3, 1, 128),
    (320, 320, 64, 3, 1, 1), (640, 640, 32, 3, 1, 1),
)  # fmt: skip


def convolutions(new: Maker) -> Iterator[Case]:
    """Convolutions of 64 images in bf16, channels first and last."""
    for last in (False, True):
        for into, out, width, size, stride, groups in CONVOLUTIONS:

            def run(
                a: tuple[int, ...] = (into, out, width, size, stride, groups), last: bool = last
            ) -> Callable[[], None]:
                c, o, w, f, s, g = a
                return both(
                    lambda x, k: F.conv2d(x, k, stride=s, padding=f // 2 if s < f or f == 1 else 0, groups=g),
                    new(64, c, w, w, last=last, grad=c > 3),
                    torch.randn(o, c // g, f, f, device=new.device, dtype=BF16)
                    .to(memory_format=torch.channels_last if last else torch.contiguous_format)
                    .requires_grad_(),
                )

            shape = f"64x{into}x{width} to {out} filter {size} stride {stride} groups {groups}"
            yield f"convolution {'last' if last else 'first'} {shape}", run


ATTENTION = (
    (1, 32, 4096, 128), (1, 32, 8192, 128), (4, 32, 2048, 128), (8, 16, 1024, 64), (16, 16, 512, 64), (2, 32, 4096, 96),
    (2, 32, 4096, 64), (1, 8, 4096, 256), (64, 16, 257, 64), (32, 16, 256, 64),
)  # fmt: skip


def attentions(new: Maker) -> Iterator[Case]:
    """Fused attention in bf16: causal, full, with a mask of truths for all heads, and with one of numbers."""
    for batch, heads, tokens, size in ATTENTION:
        for kind in ("causal", "full", "window", "padding", "bias"):

            def run(
                b: int = batch, h: int = heads, s: int = tokens, d: int = size, kind: str = kind
            ) -> Callable[[], None]:
                q, k, v = (new(b, h, min(s, 64) if new.small else s, d) for _ in range(3))
                s = q.shape[2]
                mask: Tensor | None = None
                if kind == "window":
                    i = torch.arange(s, device=new.device)
                    mask = ((i[:, None] >= i) & (i[:, None] - i < s // 2)).expand(q.shape[0], 1, s, s)
                elif kind == "padding":
                    mask = torch.ones(q.shape[0], 1, s, s, device=new.device, dtype=torch.bool)
                    mask[..., s // 2 :] = False
                elif kind == "bias":
                    mask = torch.randn(q.shape[0], 1, s, s, device=new.device, dtype=BF16)
                causal = kind == "causal"
                return both(lambda *x: F.scaled_dot_product_attention(*x, attn_mask=mask, is_causal=causal), q, k, v)

            yield f"attention {kind} {batch}x{heads}x{tokens}x{size}", run


def softmaxes(new: Maker) -> Iterator[Case]:
    """Softmax and log-softmax of 2^27 numbers by the length of a row."""
    for width in (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 30522, 32000, 50257, 51865, 128100, 128256):
        for name, dtype, to in (("bf16", BF16, None), ("fp32", FP32, None), ("bf16 to fp32", BF16, FP32)):

            def run(
                width: int = width, dtype: torch.dtype = dtype, to: torch.dtype | None = to, log: bool = width > 20000
            ) -> Callable[[], None]:
                function = F.log_softmax if log else F.softmax
                x = new(2**27 // width, width, dtype=dtype)
                return both(lambda x: function(x, -1, dtype=to), x)

            yield f"softmax {name} {2**27 // width}x{width}", run


def products(new: Maker) -> Iterator[Case]:
    """Matmuls of adapters (one side is narrow), in fp32, and of small matrices in batches."""
    for rank in (8, 16, 64):
        for rows, width in ((16384, 2048), (8192, 4096), (16384, 8192)):

            def adapter(rank: int = rank, rows: int = rows, width: int = width) -> Callable[[], None]:
                down, up = new(rank, width), new(width, rank)
                return both(lambda x, a, b: F.linear(F.linear(x, a), b), new(rows, width), down, up)

            yield f"adapter bf16 {rows}x{width} rank {rank}", adapter
    for rows in (128, 256, 512, 1024, 4096):
        for k, n in ((2048, 768), (2048, 1536), (768, 2048), (4096, 4096)):

            def linear(rows: int = rows, k: int = k, n: int = n) -> Callable[[], None]:
                return both(F.linear, new(rows, k, dtype=FP32), new(n, k, dtype=FP32))

            yield f"linear fp32 {rows}x{k} to {n}", linear
    for batch, m, n, k in ((2048, 64, 64, 128), (1024, 64, 128, 64), (512, 256, 256, 128), (4096, 49, 49, 32)):
        for dtype in (BF16, FP32):

            def batched(
                b: int = batch, m: int = m, n: int = n, k: int = k, dtype: torch.dtype = dtype
            ) -> Callable[[], None]:
                return both(torch.matmul, new(b, m, k, dtype=dtype), new(b, k, n, dtype=dtype))

            yield f"batched {SIZES[dtype]} {batch}x{m}x{n}x{k}", batched
    for batch, m in ((2048, 64), (512, 64), (512, 128)):

        def solve(b: int = batch, m: int = m) -> Callable[[], None]:
            lower = torch.tril(new(b, m, m, dtype=FP32, grad=False)) + 8 * torch.eye(m, device=new.device)
            right = new(b, m, m, dtype=FP32, grad=False)
            return lambda: torch.linalg.solve_triangular(lower, right, upper=False)

        yield f"solve_triangular fp32 {batch}x{m}", solve


# Operators with a backward, and without: name, what is said of the shape, shape, function.
WITH_GRADIENTS: tuple[tuple[str, str, tuple[int, ...], Callable[[Tensor], Tensor]], ...] = (
    ("slice", "8192x8192 to 4096", (8192, 8192), lambda x: x[..., :4096] * 1.0),
    ("chunks and cat", "8192x9216", (8192, 9216), lambda x: torch.cat([y * 1.0 for y in x.chunk(3, -1)], -1)),
    ("roll", "64x56x56x128", (64, 56, 56, 128), lambda x: torch.roll(x, (-3, -3), (1, 2))),
    ("pad", "64x54x54x128", (64, 54, 54, 128), lambda x: F.pad(x, (0, 0, 0, 2, 0, 2))),
)
WITHOUT_GRADIENTS: tuple[tuple[str, str, tuple[int, ...], Callable[[Tensor], Tensor]], ...] = (
    (
        "copy",
        "64x8x7x8x7x128 order 0 1 3 2 4 5",
        (64, 8, 7, 8, 7, 128),
        lambda x: x.permute(0, 1, 3, 2, 4, 5).contiguous(),
    ),
    ("sum", "48x8x256x256x64 last", (48, 8, 256, 256, 64), lambda x: x.sum(-1)),
    ("sum", "48x8x256x256x64 fourth", (48, 8, 256, 256, 64), lambda x: x.sum(3)),
    ("cumsum", "8192x8192", (8192, 8192), lambda x: x.cumsum(-1)),
)


def places(new: Maker) -> Iterator[Case]:
    """Copies of tensors in another order, parts, gathers along a row, rolls and pads."""
    for heads, size in ((32, 128), (16, 64), (25, 64), (32, 96), (71, 64), (12, 32)):
        for dtype in (BF16, FP32):
            yield from transposed(new, (8, heads, 2048, size), dtype)
    for dtype in (BF16, FP32):
        for row in (512, 1024):

            def gathered(row: int = row, dtype: torch.dtype = dtype) -> Callable[[], None]:
                x = new(192, 512, row, dtype=dtype)
                at = torch.randint(row, (x.shape[0], 512, 512), device=new.device)
                return both(lambda x: torch.gather(x, -1, at), x)

            yield f"gather {SIZES[dtype]} 192x512x{row}", gathered
        for made, functions in ((trained, WITH_GRADIENTS), (applied, WITHOUT_GRADIENTS)):
            for name, said, shape, function in functions:
                yield f"{name} {SIZES[dtype]} {said}", partial(made, new, function, shape, dtype)


def transposed(new: Maker, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Case]:
    """Copies and a cast of a tensor [batch, heads, tokens, size] in two other orders."""
    other, said = FP32 if dtype == BF16 else BF16, f"{SIZES[dtype]} {'x'.join(map(str, shape))} order"
    for name, function in (
        (f"copy {said} 0 2 1 3", lambda x: x.transpose(1, 2).contiguous()),
        (f"cast {said} 0 2 1 3", lambda x: x.transpose(1, 2).to(other)),
        (f"copy {said} 0 1 3 2", lambda x: x.transpose(2, 3).contiguous()),
    ):
        yield name, partial(applied, new, function, shape, dtype)


def optimizers(new: Maker) -> Iterator[Case]:
    """AdamW, its foreach form and the clipping of gradients, by dtype and the sizes of tensors."""
    shapes = {"2 of 256000x4096": [(256000, 4096)] * 2, "24 of 4096x14336": [(4096, 14336)] * 24}
    for dtype in (BF16, FP32):
        for said, made in (*shapes.items(), ("3000 of 256x256", [(256, 256)] * 3000)):
            for clips in (False, True):
                for fused in (True, False):

                    def run(
                        made: list[tuple[int, int]] = made,
                        dtype: torch.dtype = dtype,
                        clips: bool = clips,
                        fused: bool = fused,
                    ) -> Callable[[], None]:
                        found = [new(*s, dtype=dtype) for s in made]
                        for x in found:
                            x.grad = torch.randn_like(x)
                        adam = torch.optim.AdamW(found, lr=1e-4, fused=fused, foreach=not fused)

                        def step() -> None:
                            if clips:
                                torch.nn.utils.clip_grad_norm_(found, 1.0)
                            adam.step()

                        return step

                    if clips or dtype == BF16:
                        how = "fused" if fused else "foreach"
                        yield f"adamw {how} {SIZES[dtype]} {said}{' clipped' if clips else ''}", run


GROUPS = {f.__name__: f for f in (norms, images, convolutions, attentions, softmaxes, products, places, optimizers)}
