"""Times chains of elementwise operators and the loss, unfused and fused, forward and backward.

Each chain runs as torch operators (`eager`), fused by `torch.compile` (`compiled`), and as Liger's kernel (`liger`, Hsu
et al. 2024, arXiv 2410.10989) if `liger-kernel` is installed and there is a GPU. The output layer with its loss also
runs `chunked` (the paper's section 3.2): it computes logits and their gradients for some tokens at a time, so that the
logits of all tokens never exist at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrate.bundled_model.norm import EPSILON
from calibrate.records import Constant, Record, point
from calibrate.timings.elementwise import WIDTH
from calibrate.timings.matmuls import DTYPES, Case, dtypes
from calibrate.timings.timing import Bench

HEAD_DIM = 64
Function = Callable[..., Tensor]
Inputs = tuple[Tensor, ...]
Random = Callable[..., Tensor]


def elu(x: Tensor) -> Tensor:
    """Compute scaled ELU by compare, exp, minus one, select and times: five kernels if eager."""
    return torch.where(x > 0, x, torch.exp(x) - 1.0) * 1.0507


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Add a bias and compute GELU's tanh form operator by operator, as Megatron's jit fuser has it."""
    y = x + bias
    return y * 0.5 * (1.0 + torch.tanh(0.79788456 * y * (1.0 + 0.044715 * y * y)))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Compute RMSNorm as model code writes it: cast to fp32, mean square, scale, cast back, weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x.dtype) * weight


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) · up."""
    return F.silu(gate) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute x cos + rotate_half(x) sin; x [1, heads, s, d], cos and sin [1, s, d]."""
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


class Chain(NamedTuple):
    """A chain of operators.

    `inputs` makes its inputs for a number of elements and a row's width. `accesses`: how many times its fused forward
    accesses memory for each element.
    """

    function: Function
    inputs: Callable[[int, int, Random], Inputs]
    accesses: float


def _rows(number: int) -> Callable[[int, int, Random], Inputs]:
    return lambda n, width, random: tuple(random(n // width, width) for _ in range(number))


def _with_weight(n: int, width: int, random: Random) -> Inputs:
    return random(n // width, width), random(width)


def _rope_inputs(n: int, width: int, random: Random) -> Inputs:
    s = n // width
    cos, sin = (random(1, s, HEAD_DIM // 2).detach().repeat(1, 1, 2) for _ in range(2))  # Liger reads one half
    return random(1, width // HEAD_DIM, s, HEAD_DIM), cos, sin


CHAINS: Mapping[str, Chain] = {
    "elu": Chain(elu, _rows(1), 2),
    "bias_gelu": Chain(bias_gelu, _with_weight, 2),
    "rms_norm": Chain(rms_norm, _with_weight, 2),
    "swiglu": Chain(swiglu, _rows(2), 3),
    "rope": Chain(rope, _rope_inputs, 2),
}


@cache
def liger(device: str = "cuda") -> Mapping[str, Function]:
    """Return Liger's kernels by chain; if there are none, return nothing and print the reason on standard error."""
    if device != "cuda":
        print("liger-kernel: skipped, its kernels need a CUDA GPU", file=sys.stderr)
        return {}
    try:
        import triton  # noqa: F401
        from liger_kernel.transformers import functional as L
    except ImportError as error:
        print(f"liger-kernel: skipped, {error}", file=sys.stderr)
        return {}

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        found: Tensor = L.liger_rope(x, x[:, :1], cos, sin)[0]
        return found

    return {
        "rms_norm": partial(L.liger_rms_norm, eps=EPSILON, in_place=False),
        "swiglu": L.liger_swiglu,
        "rope": rotated,
        "linear_cross_entropy": L.liger_fused_linear_cross_entropy,
    }


def fused_cases(bench: Bench) -> list[Case]:
    """Return the measurements of chains and losses."""
    cases = []
    small = bench.device == "cpu" and bench.quick
    for dtype in dtypes(bench) if bench.device == "cpu" else ("bf16",):  # one dtype, as each compilation takes seconds
        for name in ("elu",) if small else CHAINS:
            for n in _sizes(bench):
                cases.append(Case(f"fused {name} {dtype} {n}", partial(_chain, name=name, dtype=dtype, elements=n)))
        for shape in _losses(bench):
            run = partial(_loss, dtype=dtype, shape=shape)
            cases.append(Case(f"fused linear_cross_entropy {dtype} {' '.join(map(str, shape))}", run))
    return cases


def _sizes(bench: Bench) -> tuple[int, ...]:
    if bench.device == "cpu":
        return (1 << 20,) if bench.quick else (1 << 18, 1 << 22)
    return (1 << 24,) if bench.quick else (1 << 20, 1 << 24, 1 << 27)


def _losses(bench: Bench) -> tuple[tuple[int, int, int], ...]:
    """Return (tokens, vocabulary, hidden) of each loss to measure."""
    if bench.device == "cpu":
        return ((512, 4096, 256),) if bench.quick else ((512, 4096, 256), (1024, 16384, 256))
    return ((8192, 32000, 4096),) if bench.quick else ((8192, 32000, 4096), (8192, 128256, 4096))


def _ways(bench: Bench, name: str, function: Function) -> dict[str, Function]:
    """Return the chain eager, compiled, and as Liger's kernel if there is one."""
    compiled: Function = torch.compile(function, dynamic=False)
    found = {"eager": function, "compiled": compiled}
    if name in liger(bench.device):
        found["liger"] = liger(bench.device)[name]
    return found


def _chain(bench: Bench, name: str, dtype: str, elements: int) -> list[Record]:
    """Time one chain in all ways, each with the bytes that one kernel would move (backward: half as much again)."""
    chain = CHAINS[name]
    moved = round(chain.accesses * elements * torch.finfo(DTYPES[dtype]).bits / 8)
    random = partial(_random, bench, dtype)
    sets = [chain.inputs(elements, WIDTH[bench.device], random) for _ in range(bench.copies(moved))]
    ready = {}
    for how, function in _ways(bench, name, chain.function).items():
        try:
            ready[f"elementwise:{name}_{how}"] = _ready(function, sets)
        except RuntimeError as error:  # no C++ compiler, or no Triton for this GPU
            print(f"{name}: {how} skipped: {str(error).splitlines()[0]}", file=sys.stderr)
    return _timed(bench, dtype, (moved,), ready)


Calls = list[Callable[[], object]]


def _ready(function: Function, sets: Sequence[Inputs]) -> tuple[Calls, Calls]:
    """Return calls of the forward, and calls of the backward."""
    forward: Calls = []
    backward: Calls = []
    for inputs in sets:
        out = function(*inputs)
        wanted = [x for x in inputs if x.requires_grad]
        grad = torch.ones_like(out) if out.ndim == 0 else torch.randn_like(out)
        forward.append(partial(function, *inputs))
        backward.append(partial(torch.autograd.grad, out, wanted, grad, retain_graph=True))
    return forward, backward


def _timed(bench: Bench, dtype: str, shape: tuple[int, ...], ready: Mapping[str, tuple[Calls, Calls]]) -> list[Record]:
    """Time all ways side by side, first forward, then backward."""
    times = [bench.side_by_side([calls[i] for calls in ready.values()]) for i in (0, 1)]
    return [
        point(op + suffix, dtype, shape, timing)
        for suffix, column in zip(("", "_backward"), times, strict=True)
        for op, timing in zip(ready, column, strict=True)
    ]


class _Chunked(torch.autograd.Function):
    """Mean cross-entropy of x Wᵀ, some rows at a time; the forward also computes both gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        rows, hidden = x.shape
        chunk = chunk_rows(rows, len(weight), hidden)
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        for i in range(0, rows, chunk):
            part = x[i : i + chunk]
            chosen = target[i : i + chunk, None]
            logs = torch.log_softmax((part @ weight.t()).float(), -1)
            total -= logs.gather(1, chosen).sum()
            grad = logs.exp_()
            grad.scatter_add_(1, chosen, torch.full_like(chosen, -1, dtype=grad.dtype))
            slope = (grad / rows).to(x.dtype)
            grad_x[i : i + chunk] = slope @ weight
            grad_weight.addmm_(slope.t(), part)
        ctx.save_for_backward(grad_x, grad_weight)
        return total / rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad.to(grad_x.dtype), grad_weight * grad.to(grad_weight.dtype), None


def chunk_rows(rows: int, vocab: int, hidden: int) -> int:
    """Return how many tokens' logits exist at once, as Liger chooses: as many bytes as all tokens' inputs, about.

    >>> chunk_rows(8192, 128256, 4096)
    256
    """
    return 1 << (-(-rows // -(-vocab // hidden)) - 1).bit_length()


def chunked_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Compute the loss chunk by chunk: x [tokens, hidden], weight [vocab, hidden], target [tokens] → scalar."""
    found: Tensor = _Chunked.apply(x, weight, target)
    return found


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Compute the loss of `chunked_cross_entropy` with all logits, and their fp32 copy, at once."""
    return F.cross_entropy((x @ weight.t()).float(), target)


def _loss(bench: Bench, dtype: str, shape: tuple[int, int, int]) -> list[Record]:
    """Time the loss in all ways, and measure the peak of bytes that forward and backward allocate."""
    tokens, vocab, hidden = shape
    ways = {"eager": linear_cross_entropy, "chunked": chunked_cross_entropy}
    if "linear_cross_entropy" in liger(bench.device):
        ways["liger"] = liger(bench.device)["linear_cross_entropy"]
    x, weight = _random(bench, dtype, tokens, hidden), _random(bench, dtype, vocab, hidden)
    sets = [(x, weight, torch.randint(vocab, (tokens,), device=bench.device))]
    out = _timed(bench, dtype, shape, {f"linear_cross_entropy:{how}": _ready(f, sets) for how, f in ways.items()})
    for how, function in ways.items():
        op = f"linear_cross_entropy:{how}"
        name = f"{op} {dtype} {'x'.join(map(str, shape))} peak_bytes"
        peak = peak_bytes(bench.device, partial(_gradients, function, sets[0]))
        out.append(Constant(name, float(peak), "most bytes allocated at once by forward and backward"))
    return out


def _gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> object:
    return torch.autograd.grad(function(*inputs), inputs[:2])


def peak_bytes(device: str, work: Callable[[], object]) -> int:
    """Run `work` and return its peak of allocated bytes, beyond what was allocated before."""
    work()
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints when it starts and stops
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    now = peak = 0
    events = (e for e in found.profiler.kineto_results.events() if e.name() == "[memory]")
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def _random(bench: Bench, dtype: str, *shape: int) -> Tensor:
    return torch.randn(*shape, device=bench.device, dtype=DTYPES[dtype]).requires_grad_()
