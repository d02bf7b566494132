"""Times memory-bound operators: copies, activations, norms, softmax, losses, the optimizer.

A point's shape is (bytes,): the bytes that one kernel moves, counted as `sim.models` counts them for that operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.bundled_model.norm import eager_rms_norm
from calibrate.records import Constant, Record, point
from calibrate.timings.matmuls import DTYPES, Case, dtypes, shapes_as_in
from calibrate.timings.timing import STEP_BYTES, Bench
from sim.models.norm import rms_norm_eager

WIDTH = {"cpu": 512, "cuda": 4096}  # of a row that a norm or a softmax reduces: a hidden size of models run there
CHANNELS = 64  # of images that a batch norm or a pooling works on
Call = Callable[[], object]
Maker = Callable[[Tensor], Call]


def elementwise_cases(bench: Bench) -> list[Case]:
    """Return the measurements of elementwise operators, embeddings and losses."""
    cases = []
    for dtype in dtypes(bench):
        for elements in _sizes(shapes_as_in(bench, dtype)):
            for op in _OPS:
                run = partial(_operator, op=op, dtype=dtype, elements=elements)
                cases.append(Case(f"elementwise {op} {dtype} {elements}", run))
            run = partial(_embedding, dtype=dtype, tokens=elements // WIDTH[bench.device])
            cases.append(Case(f"elementwise embedding {dtype} {elements}", run))
        large = partial(_operator, op="elementwise", dtype=dtype, elements=4 * _sizes(bench)[-1])
        cases.append(Case(f"elementwise large {dtype}", large))
        for tokens, vocab in _losses(bench):
            run = partial(_cross_entropy, dtype=dtype, tokens=tokens, vocab=vocab)
            cases.append(Case(f"elementwise cross_entropy {dtype} {tokens} {vocab}", run))
    return cases


def _sizes(bench: Bench) -> tuple[int, ...]:
    if bench.device == "cpu":
        return (1 << 16, 1 << 18, 1 << 20) if bench.quick else tuple(1 << i for i in range(14, 24, 2))
    return (1 << 20, 1 << 24, 1 << 27) if bench.quick else tuple(1 << i for i in range(16, 30, 2))


def _losses(bench: Bench) -> tuple[tuple[int, int], ...]:
    """Return (tokens, vocabulary) of each loss to measure."""
    if bench.device == "cpu":
        return ((256, 1024), (256, 4096), (1024, 4096))
    return ((2048, 32000), (8192, 32000))


def _grad(
    function: Callable[[Tensor], Tensor], x: Tensor, gradient: Callable[[Tensor], Tensor] = torch.randn_like
) -> Call:
    x = x.requires_grad_()
    out = function(x)
    return partial(torch.autograd.grad, out, x, gradient(out), retain_graph=True)


def _norm_grad(x: Tensor) -> Call:
    x = x.requires_grad_()
    weight, bias = (torch.ones(x.shape[1:], device=x.device, dtype=x.dtype, requires_grad=True) for _ in range(2))
    out = F.layer_norm(x, x.shape[1:], weight, bias)
    return partial(torch.autograd.grad, out, (x, weight, bias), torch.randn_like(out), retain_graph=True)


def _norm(x: Tensor) -> Call:
    weight, bias = (torch.ones(x.shape[1:], device=x.device, dtype=x.dtype) for _ in range(2))
    return partial(F.layer_norm, x, x.shape[1:], weight, bias)


def _eager_norm(x: Tensor) -> Call:
    return partial(eager_rms_norm, x, torch.ones(x.shape[1:], device=x.device, dtype=x.dtype))


def _eager_norm_grad(x: Tensor) -> Call:
    x, weight = x.requires_grad_(), torch.ones(x.shape[1:], device=x.device, dtype=x.dtype, requires_grad=True)
    out = eager_rms_norm(x, weight)
    return partial(torch.autograd.grad, out, (x, weight), torch.randn_like(out), retain_graph=True)


_gelu = partial(F.gelu, approximate="tanh")

Traffic = Callable[[int], tuple[float, int]]  # from the bytes of an element: bytes moved for it, and kernels


def _accesses(count: float, kernels: int = 1) -> Traffic:
    return lambda size: (count * size, kernels)


def _other(x: Tensor) -> torch.dtype:
    """Return fp32 for a 16-bit tensor and bf16 for an fp32 one; a sum of both is fp32."""
    return torch.bfloat16 if x.dtype == torch.float32 else torch.float32


def _mixed(size: int) -> tuple[float, int]:
    """Return the traffic of a sum of a 16-bit and an fp32 operand, with an fp32 result."""
    return 2.0 + 4.0 + 4.0, 1


def _transposed(x: Tensor) -> Tensor:
    """Make a tensor of the size of `x` whose last dimension is not contiguous."""
    return torch.ones(x.shape[1], x.shape[0], device=x.device, dtype=x.dtype).t()


def _images(x: Tensor) -> Tensor:
    """View a tensor as 4 images of 64 channels that are twice as high as wide, or as high."""
    pixels = x.numel() // (4 * CHANNELS)
    width = 1 << (pixels.bit_length() - 1) // 2
    return x.detach().view(4, CHANNELS, pixels // width, width)


def _batch_norm(x: Tensor, channels: int) -> Tensor:
    weight, bias = (torch.ones(channels, device=x.device, dtype=x.dtype, requires_grad=True) for _ in range(2))
    return F.batch_norm(x, None, None, weight, bias, training=True)


def _rotated(x: Tensor) -> Call:
    """Join two halves of heads of 64, of which one is a view, as rotary embeddings do."""
    heads = x.view(-1, 64)
    first, second = heads[:, :32], -heads[:, 32:]
    return partial(torch.cat, (second, first), -1)


def _slice_backward(x: Tensor) -> Call:
    """Put a gradient of half of the columns into zeros."""
    half = x.shape[1] // 2
    return partial(torch.ops.aten.slice_backward, x[:, :half].contiguous(), x.shape, 1, 0, half, 1)


def _shuffled(x: Tensor) -> Tensor:
    """Make the rows' numbers in random order."""
    return torch.randperm(len(x), device=x.device)


def _eager_forward(size: int) -> tuple[float, int]:
    """Return bytes and kernels as the simulator counts them."""
    t = rms_norm_eager(size)
    return t.forward_bytes, t.forward_kernels


def _eager_backward(size: int) -> tuple[float, int]:
    t = rms_norm_eager(size)
    return t.backward_bytes, t.backward_kernels


# For each operator of the profile: its traffic, and a function that makes one call of it.
_OPS: dict[str, tuple[Traffic, Maker]] = {
    "elementwise": (_accesses(3), lambda x: partial(torch.add, x, torch.ones_like(x))),
    "elementwise:gelu": (_accesses(2), lambda x: partial(_gelu, x)),
    "elementwise:gelu_backward": (_accesses(3), partial(_grad, _gelu)),
    "elementwise:unary": (_accesses(2), lambda x: partial(torch.mul, x, 1.5)),
    "elementwise:broadcast": (_accesses(2), lambda x: partial(torch.add, x, x[0].clone())),
    "elementwise:transposed": (_accesses(3), lambda x: partial(torch.add, x, _transposed(x))),
    "elementwise:mixed": (_mixed, lambda x: partial(torch.add, x, torch.ones_like(x, dtype=_other(x)))),
    "cast": (lambda size: (6.0, 1), lambda x: partial(x.to(_other(x)).to, x.dtype)),
    "elementwise:tanh": (_accesses(2), lambda x: partial(torch.tanh, x)),
    "elementwise:silu": (_accesses(2), lambda x: partial(F.silu, x)),
    "elementwise:silu_backward": (_accesses(3), partial(_grad, F.silu)),
    "elementwise:reduce_last": (_accesses(1), lambda x: partial(torch.sum, x, -1)),
    "elementwise:reduce_first": (_accesses(1), lambda x: partial(torch.sum, x, 0)),
    "elementwise:swiglu": (_accesses(5, 2), lambda x: partial(lambda a, b: F.silu(a) * b, x, torch.ones_like(x))),
    "norm": (_accesses(2), _norm),
    "norm_input_grad": (_accesses(5, 2), _norm_grad),
    "norm_eager": (_eager_forward, _eager_norm),
    "norm_eager_input_grad": (_eager_backward, _eager_norm_grad),
    "softmax": (_accesses(2), lambda x: partial(torch.softmax, x, -1)),
    "softmax_input_grad": (_accesses(3), partial(_grad, partial(torch.softmax, dim=-1))),
    "permute": (_accesses(2), lambda x: lambda: x.t().contiguous()),
    "norm:batch": (_accesses(2), lambda x: partial(F.batch_norm, _images(x), None, None, training=True)),
    "norm:batch_backward": (_accesses(3), lambda x: _grad(partial(_batch_norm, channels=CHANNELS), _images(x))),
    "elementwise:max_pool": (
        lambda size: (1.25 * size + 2.0, 1),  # a quarter as many results, and where each was found
        lambda x: partial(F.max_pool2d, _images(x), 3, 2, 1),
    ),
    "elementwise:function_transposed": (_accesses(3), lambda x: _grad(F.silu, x, _transposed)),
    "elementwise:in_place": (_accesses(2), lambda x: partial(x.mul_, 1.0)),
    "elementwise:random": (_accesses(1), lambda x: partial(x.bernoulli_, 0.9)),
    "elementwise:max_last": (_accesses(1), lambda x: partial(torch.max, x, -1)),
    "copy:cat": (_accesses(2), _rotated),
    "copy:slice_backward": (_accesses(2, 2), _slice_backward),  # zeros, and half of them read and written
    "embedding:index": (_accesses(2), lambda x: partial(torch.ops.aten.index, x, [_shuffled(x)])),
    "embedding:index_put": (
        _accesses(3),
        lambda x: partial(torch.ops.aten.index_put, torch.zeros_like(x), [_shuffled(x)], x, True),
    ),
}


def _operator(bench: Bench, op: str, dtype: str, elements: int) -> list[Record]:
    traffic, maker = _OPS[op]
    each_bytes, kernels = traffic(torch.finfo(DTYPES[dtype]).bits // 8)
    moved, width = each_bytes * elements, WIDTH[bench.device]
    calls = [
        maker(torch.randn(elements // width, width, device=bench.device, dtype=DTYPES[dtype]))
        for _ in range(bench.copies(moved))
    ]
    timing = bench.time(calls)
    each = timing._replace(seconds=timing.seconds / kernels)
    return [point(op, dtype, (round(moved / kernels),), each)]


def _embedding(bench: Bench, dtype: str, tokens: int) -> list[Record]:
    """Time a look-up of `tokens` rows in 4,096, and its backward: a dense gradient and its sum, as 3 kernels."""
    table = torch.randn(4096, WIDTH[bench.device], device=bench.device, dtype=DTYPES[dtype], requires_grad=True)
    total = torch.zeros_like(table, requires_grad=False)
    index = torch.randint(len(table), (tokens,), device=bench.device)
    out = F.embedding(index, table)
    grad = torch.randn_like(out)

    def backward() -> None:
        total.add_(torch.autograd.grad(out, table, grad, retain_graph=True)[0])

    size = table.element_size()
    forward, back = bench.time([partial(F.embedding, index, table)]), bench.time([backward])
    moved = size * (2 * out.numel() + 4 * table.numel())
    return [
        point("embedding", dtype, (2 * size * out.numel(),), forward),
        point("embedding_weight_grad", dtype, (moved // 3,), back._replace(seconds=back.seconds / 3)),
    ]


def _cross_entropy(bench: Bench, dtype: str, tokens: int, vocab: int) -> list[Record]:
    """Time torch's own loss, divided by the 7 forward and 4 backward kernels that `sim.models.output.head` counts."""
    logits = torch.randn(tokens, vocab, device=bench.device, dtype=DTYPES[dtype], requires_grad=True)
    target = torch.randint(vocab, (tokens,), device=bench.device)

    def loss() -> Tensor:
        return F.cross_entropy(logits.float(), target)

    copy = 0 if dtype == "fp32" else 6
    forward = bench.time([loss])
    backward = bench.time([partial(torch.autograd.grad, loss(), logits, retain_graph=True)])
    return [
        point(
            op,
            dtype,
            (round(per_element * logits.numel() / kernels),),
            timing._replace(seconds=timing.seconds / kernels),
        )
        for op, per_element, kernels, timing in (
            ("cross_entropy", 32 + copy, 7, forward),
            ("cross_entropy_input_grad", 16 + copy, 4, backward),
        )
    ]


def memory_cases(bench: Bench) -> list[Case]:
    """Return the measurements of copies within the device."""
    exponents = (16, 20, 24, 26) if bench.device == "cpu" else (20, 24, 28, 30)
    sizes = [1 << e for e in exponents]
    return [Case(f"memory copy {n}", partial(_copy, size=n, last=n == sizes[-1])) for n in sizes]


def _copy(bench: Bench, size: int, last: bool) -> list[Record]:
    """Time a copy of `size` bytes, which reads and writes them once. The largest copy gives the bandwidth."""
    pairs = [
        (
            torch.zeros(size, dtype=torch.uint8, device=bench.device),
            torch.ones(size, dtype=torch.uint8, device=bench.device),
        )
        for _ in range(bench.copies(2.0 * size))
    ]
    timing = bench.time([partial(a.copy_, b) for a, b in pairs])
    records: list[Record] = [point("copy", "fp32" if bench.device == "cpu" else "bf16", (2 * size,), timing)]
    if last:
        rate = 2 * size / timing.seconds
        source = f"copy of {size} bytes, read and written"
        records.append(Constant("memory_bandwidth_bytes_per_s", rate, source))
    return records


def optimizer_cases(bench: Bench) -> list[Case]:
    """Return the measurements of optimizer steps over a layer's 12 h² parameters; real runs use the fused AdamW."""
    hidden: tuple[int, ...]
    if bench.device == "cpu":
        hidden = (128, 256, 512) if bench.quick else (64, 128, 256, 512, 1024)
    else:
        hidden = (1024, 4096) if bench.quick else (512, 1024, 2048, 4096, 8192)
    return [Case(f"optimizer {op} {h}", partial(_optimizer, op=op, h=h)) for h in hidden for op in _OPTIMIZERS]


# Bytes for each fp32 parameter: the gradient is read; the parameter and AdamW's two moments are read and written.
_OPTIMIZERS: dict[str, tuple[int, type[torch.optim.Optimizer], dict[str, bool]]] = {
    "adamw": (28, torch.optim.AdamW, {"fused": True}),
    "adamw_foreach": (28, torch.optim.AdamW, {"foreach": True}),
    "adamw_single_tensor": (28, torch.optim.AdamW, {"foreach": False}),
    "sgd": (12, torch.optim.SGD, {"fused": True}),
}


def _optimizer(bench: Bench, op: str, h: int) -> list[Record]:
    per_parameter, kind, options = _OPTIMIZERS[op]
    shapes = ((3 * h, h), (3 * h,), (h, h), (h,), (4 * h, h), (4 * h,), (h, 4 * h), (h,), (h,), (h,))
    moved = per_parameter * sum(math.prod(shape) for shape in shapes)
    steps = []
    held = 4 * 4 * moved // per_parameter  # bytes of parameters, gradients and both moments
    copies = -(-STEP_BYTES // held) if bench.device == "cpu" else 1
    for _ in range(copies):  # between two steps, an optimizer's states leave the cache
        parameters = [torch.nn.Parameter(torch.randn(*shape, device=bench.device)) for shape in shapes]
        for p in parameters:
            p.grad = torch.randn_like(p)
        steps.append(kind(parameters, lr=1e-4, **options).step)  # type: ignore[call-arg, arg-type]
    return [point(f"optimizer:{op}", "fp32", (moved,), bench.time(steps))]
