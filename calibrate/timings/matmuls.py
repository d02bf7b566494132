"""Times matmuls of the shapes of transformer layers, in the memory layouts of forward and both gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from calibrate.records import Constant, Point, Record, point
from calibrate.timings.timing import Bench

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MOST_FLOPS = {"cpu": 2e10, "cuda": 1e14}
_QUICK_FLOPS = {"cpu": 6e9, "cuda": 2e13}
_FP32_FLOPS = 4e12  # limit on CUDA, where fp32 runs outside the tensor cores
ODD_VOCABULARY = (8192, 1024, 50257, 50304)  # tokens, hidden size, words of GPT-2, words padded for tensor cores
_FP8_SINCE = (8, 9)  # first compute capability with fp8 matmuls


class Case(NamedTuple):
    """One measurement: a unique key, and the function that runs it."""

    key: str
    run: Callable[[Bench], list[Record]]


def dtypes(bench: Bench) -> tuple[str, ...]:
    """Return the dtypes to measure: on a CPU fp32, on CUDA bf16; a full run adds bf16, or fp16 and fp32."""
    if bench.device == "cpu":
        return ("fp32",) if bench.quick else ("fp32", "bf16")
    return ("bf16",) if bench.quick else ("bf16", "fp16", "fp32")


def shapes_as_in(bench: Bench, dtype: str) -> Bench:
    """Return the bench whose shapes a dtype takes: on CUDA all dtypes but bf16 take those of a quick run."""
    return replace(bench, quick=bench.quick or (bench.device == "cuda" and dtype != "bf16"))


def matmul_cases(bench: Bench) -> list[Case]:
    """Return the measurements of linear layers (forward, input gradient, weight gradient) and of batched matmuls."""
    cases = []
    for dtype in dtypes(bench):
        shapes = shapes_as_in(bench, dtype)
        for tokens, n, k in linear_shapes(shapes):
            if dtype == "fp32" and bench.device == "cuda" and 2.0 * tokens * n * k > _FP32_FLOPS:
                continue
            for phase in ("", "_input_grad", "_weight_grad"):
                key = f"matmul{phase} {dtype} {tokens}x{n}x{k}"
                cases.append(Case(key, partial(_linear, phase=phase, dtype=dtype, tokens=tokens, n=n, k=k)))
        for batch, s, d in batched_shapes(shapes):
            key = f"matmul {dtype} batch {batch} {s}x{s}x{d}"
            cases.append(Case(key, partial(_batched, dtype=dtype, batch=batch, s=s, d=d)))
        for shape in convolution_shapes(shapes):
            for phase in ("", "_backward"):
                run = partial(_convolution, phase=phase, dtype=dtype, shape=shape)
                cases.append(Case(f"convolution{phase} {dtype} {'x'.join(map(str, shape))}", run))
    if bench.device == "cuda":
        cases.append(Case("matmul odd vocabulary", _odd_vocabulary))
    return cases + _fp8_cases(bench)


def convolution_shapes(bench: Bench) -> list[tuple[int, int, int, int, int]]:
    """Return (images, pixels in a row, channels read, channels written, kernel) of a ResNet's stages."""
    images = {"cpu": (1, 8), "cuda": (32, 128)}[bench.device]
    stages = [(224 >> 2 + i, 64 << i) for i in range(4)]
    squares = [(rows, c, c, kernel) for rows, c in stages for kernel in (3, 1)]
    narrower = [(rows // 2, c, 2 * c, kernel) for rows, c in stages[:3] for kernel in (3, 1)]
    tiny = [(2, 512, 512, kernel) for kernel in (3, 1)]  # the last stage of an image of 64 pixels
    each = [(56, 3, 64, 7), *squares, *tiny, *([] if bench.quick else narrower)]
    return [(n, *shape) for n in images for shape in each]


def _fp8_cases(bench: Bench) -> list[Case]:
    """Return the measurements of linear layers with both matrices in E4M3, one scale each; casts are not included."""
    if bench.device != "cuda" or torch.cuda.get_device_capability() < _FP8_SINCE:
        return []
    shapes = dict.fromkeys(x for m, n, k in linear_shapes(bench) for x in ((m, n, k), (m, k, n), (n, k, m)))
    return [Case(f"matmul fp8 {m}x{n}x{k}", partial(_fp8, m=m, n=n, k=k)) for m, n, k in shapes]


def linear_shapes(bench: Bench) -> list[tuple[int, int, int]]:
    """Return (tokens, outputs, inputs) of query-key-value, projection, both MLP layers and the output layer."""
    hidden: tuple[int, ...]
    rows: tuple[int, ...]
    vocab: tuple[int, ...]
    if bench.device == "cpu":
        hidden = (256, 512, 768) if bench.quick else (64, 128, 256, 512, 768, 1024, 2048)
        rows = (256, 1024) if bench.quick else (64, 128, 256, 512, 1024, 2048, 4096)
        vocab = (4096,)
    else:
        hidden = (1024, 4096, 8192) if bench.quick else (512, 1024, 2048, 4096, 5120, 8192, 12288, 16384)
        rows = (2048, 8192) if bench.quick else (512, 1024, 2048, 4096, 8192, 16384)
        vocab = (32000,) if bench.quick else (32000, 128256)
    limit = (_QUICK_FLOPS if bench.quick else _MOST_FLOPS)[bench.device]
    shapes = [
        (m, n, k)
        for m in rows
        for h in hidden
        for n, k in ((3 * h, h), (h, h), (4 * h, h), (h, 4 * h), *((v, h) for v in vocab))
    ]
    return list(dict.fromkeys(s for s in shapes if 2.0 * s[0] * s[1] * s[2] <= limit))


def batched_shapes(bench: Bench) -> list[tuple[int, int, int]]:
    """Return (batch × heads, sequence length, head size) of unfused attention's batched matmuls."""
    if bench.device == "cpu":
        return (
            [(64, 64, 64), (8, 256, 32), (4, 256, 64), (8, 512, 64)]
            if bench.quick
            else [(64, 64, d) for d in (32, 64)]
            + [(b, s, d) for b in (4, 8, 16) for s in (128, 256, 512, 1024) for d in (32, 64, 128)]
        )
    heads, lengths = ((32,), (2048,)) if bench.quick else ((8, 32, 96), (1024, 2048, 4096))
    return [(b, s, d) for b in heads for s in lengths for d in (64, 128)]


def _linear(bench: Bench, phase: str, dtype: str, tokens: int, n: int, k: int) -> list[Record]:
    """Time forward x Wᵀ, input gradient dy W or weight gradient dyᵀ x, with W [n, k] as torch.nn.Linear keeps it."""
    calls: list[Callable[[], Tensor]] = []
    size = torch.finfo(DTYPES[dtype]).bits // 8
    for _ in range(bench.copies(size * (tokens * k + n * k + tokens * n))):
        x, w, dy = (_random(bench, dtype, *s) for s in ((tokens, k), (n, k), (tokens, n)))
        if phase == "_input_grad":
            calls.append(partial(torch.mm, dy, w))
        elif phase == "_weight_grad":
            calls.append(partial(torch.mm, dy.t(), x))
        else:
            calls.append(partial(torch.mm, x, w.t()))
    shapes = {"": (1, tokens, n, k), "_input_grad": (1, tokens, k, n), "_weight_grad": (1, n, k, tokens)}
    return [point(f"gemm{phase}", dtype, shapes[phase], bench.time(calls))]


def _odd_vocabulary(bench: Bench) -> list[Record]:
    """Time the three products of GPT-2's output layer, of odd width, and those of a padded one."""
    tokens, hidden, words, padded = ODD_VOCABULARY
    seconds = {
        n: sum(
            record.seconds
            for phase in ("", "_input_grad", "_weight_grad")
            for record in _linear(bench, phase, "bf16", tokens, n, hidden)
            if isinstance(record, Point)
        )
        for n in (words, padded)
    }
    how = f"three products of {tokens} x {hidden} x {words} ÷ those of {padded}, by their widths"
    return [Constant("unaligned_matmul_slowdown", seconds[words] / seconds[padded] * padded / words, how)]


def _fp8(bench: Bench, m: int, n: int, k: int) -> list[Record]:
    """Time a [m, k] bᵀ with b [n, k], to bf16, with Hopper's fast accumulation.

    All three products of an fp8 linear layer run in this layout, the only one that the tensor cores take.
    """
    one, calls = torch.ones((), device=bench.device), []
    for _ in range(bench.copies(m * k + n * k + 2 * m * n)):
        a, b = (_random(bench, "bf16", rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
        calls.append(
            partial(torch._scaled_mm, a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        )
    return [point("gemm", "fp8", (1, m, n, k), bench.time(calls))]


def _batched(bench: Bench, dtype: str, batch: int, s: int, d: int) -> list[Record]:
    """Time Q Kᵀ and P V of unfused attention."""
    scores: list[Callable[[], Tensor]] = []
    values: list[Callable[[], Tensor]] = []
    size = torch.finfo(DTYPES[dtype]).bits // 8
    for _ in range(bench.copies(size * batch * (s * s + 2 * s * d))):
        q, k, p = (_random(bench, dtype, batch, *x) for x in ((s, d), (s, d), (s, s)))
        scores.append(partial(torch.bmm, q, k.transpose(1, 2)))
        values.append(partial(torch.bmm, p, k))
    return [
        point("gemm", dtype, (batch, s, s, d), bench.time(scores)),
        point("gemm", dtype, (batch, s, d, s), bench.time(values)),
    ]


def _convolution(bench: Bench, phase: str, dtype: str, shape: tuple[int, int, int, int, int]) -> list[Record]:
    """Time a convolution, or its backward with the gradients of input and weight.

    The point's shape is that of the matmul that computes it, as `sim.models.captured.operators` has it.
    """
    images, pixels, read, written, kernel = shape
    calls: list[Callable[[], object]] = []
    m, k = images * pixels * pixels, read * kernel * kernel
    size = torch.finfo(DTYPES[dtype]).bits // 8
    for _ in range(bench.copies(size * (m * read + written * k + m * written))):
        x = _random(bench, dtype, images, read, pixels, pixels).requires_grad_()
        weight = _random(bench, dtype, written, read, kernel, kernel).requires_grad_()
        conv: Callable[..., Tensor] = torch.nn.functional.conv2d
        call: Callable[[], object] = partial(conv, x, weight, padding=kernel // 2)
        if phase:
            out = conv(x, weight, padding=kernel // 2)
            call = partial(torch.autograd.grad, out, (x, weight), torch.ones_like(out), retain_graph=True)
        calls.append(call)
    products = 2 if phase else 1
    return [point(f"gemm:convolution{phase}", dtype, (products, m, written, k), bench.time(calls))]


def launch_cases(bench: Bench) -> list[Case]:
    """Return the measurements of a call in a loop, and of the host that issues a whole model's kernels."""
    return [Case("launch", _launch), Case("host", _host)]


def _host(bench: Bench) -> list[Record]:
    from calibrate.timings.host import host

    return host(bench)


def _launch(bench: Bench) -> list[Record]:
    """Time an operator on 8 elements.

    On a CPU the same core dispatches and computes, so this time follows every operator. A GPU's host runs ahead, and
    this is the shortest time from one launch to the next.
    """
    x = _random(bench, "fp32", 8).requires_grad_()
    add = bench.time([partial(torch.add, x, x)]).seconds
    how = "torch.add of 8 elements, recorded by autograd"
    if bench.device == "cpu":
        none = Constant("launch_overhead_s", 0.0, "a CPU does not queue kernels: see kernel_gap_s")
        return [none, Constant("kernel_gap_s", add, how)]
    return [Constant("launch_overhead_s", add, how)]


def _random(bench: Bench, dtype: str, *shape: int) -> Tensor:
    return torch.randn(*shape, device=bench.device, dtype=DTYPES[dtype])
