"""Log-probabilities of labels in tiles of tokens and of the vocabulary: `cross_entropy: tiled`, TRL's fused LM head.

TRL 1.16, kernels/chunked_logprob.py (`ChunkedLogProbFunction`): the forward multiplies tiles of 4,096 tokens and 32,768
entries of the vocabulary, each written into one buffer, and a Triton kernel folds a tile into each token's running
maximum and sums. The backward multiplies each tile again, a second kernel turns it into the logits' gradient in place,
and two matmuls add it to the gradients of inputs and weights, which are kept in fp32 and cast at the end. So a trained
matrix takes 8 flops a weight and token, a frozen one 6, and only the inputs are kept. Every token is taken as scored;
TRL leaves out those whose label is hidden, such as a prompt's.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Item, NeededBy, Phase, Program, Role, Saved, TensorRole
from sim.models.dims import Dims
from sim.models.operators import F, I, Operator, W, accumulation, gemm, memory_op, small_kernels

# kernels/chunked_logprob.py, trainer/utils.py (_CHUNKED_LOGPROB_CHUNK_SIZE)
TILE_TOKENS, TILE_VOCABULARY = 4096, 32_768
# Per-token statistics: filled before the tiles; behind them the logarithm of the sum, and what is made of it.
STATISTICS_FILLED, STATISTICS_ENDED = 7, 8


def tiled_output(d: Dims, name: str, vocab: int) -> Operator:
    """`[tokens, hidden] x [hidden, vocab]` and the labels' log-probabilities. Frozen weights get no gradient."""
    rows, h, e, trained = d.tokens, d.hidden, d.act_bytes, d.lora is None
    size = vocab * h
    buffer = min(rows, TILE_TOKENS) * TILE_VOCABULARY * e
    gradients = FP32_BYTES * (rows * h + (size if trained else 0))
    kept = Saved(f"{name} input", e * rows * h, NeededBy.BOTH, TensorRole.INPUT)
    return Operator(
        name,
        tuple(_forward(d, name, vocab)),
        tuple(_backward(d, name, vocab)),
        (kept,),
        params=size,
        weights=((vocab, h),),
        forward_bytes=buffer,
        backward_bytes=buffer + gradients + e * rows * h,
        returns_gradient=trained and d.autocast and d.grad_bytes == FP32_BYTES,
    )


def _tiles(rows: int, vocab: int) -> Iterator[tuple[str, int, int]]:
    """The tiles in the order of the loops: a name, tokens, entries of the vocabulary."""
    for i, start in enumerate(range(0, rows, TILE_TOKENS)):
        for j, entry in enumerate(range(0, vocab, TILE_VOCABULARY)):
            yield f"{i}_{j}", min(TILE_TOKENS, rows - start), min(TILE_VOCABULARY, vocab - entry)


def _product(d: Dims, name: str, phase: Phase, c: int, v: int) -> Iterator[Item]:
    """A tile's logits, [c, v]; under autocast of fp32 weights that are cast for it."""
    if d.autocast:
        n = float(v * d.hidden)
        yield memory_op(f"{name}_cast", phase, "cast", n, (FP32_BYTES + d.act_bytes) * n, d.act)
    yield gemm(name, phase, c, v, d.hidden, d.act, role=Role.OUTPUT)


def _forward(d: Dims, name: str, vocab: int) -> Iterator[Item]:
    yield small_kernels("log_probabilities_begin", F, STATISTICS_FILLED)
    for tile, c, v in _tiles(d.tokens, vocab):
        yield from _product(d, f"{name}_{tile}", F, c, v)
        yield memory_op(f"log_probabilities_{tile}", F, "cross_entropy", c * v, d.act_bytes * c * v, d.act, 1)
    yield small_kernels("log_probabilities_end", F, STATISTICS_ENDED)


def _backward(d: Dims, name: str, vocab: int) -> Iterator[Item]:
    rows, h, e, size, trained = d.tokens, d.hidden, d.act_bytes, vocab * d.hidden, d.lora is None
    yield memory_op(f"{name}_dgrad_zero", I, "elementwise", rows * h, FP32_BYTES * rows * h, "fp32")
    if trained:
        yield memory_op(f"{name}_wgrad_zero", I, "elementwise", size, FP32_BYTES * size, "fp32")
    for tile, c, v in _tiles(rows, vocab):
        yield from _product(d, f"{name}_again_{tile}", I, c, v)
        yield memory_op(f"log_probabilities_backward_{tile}", I, "cross_entropy", c * v, 2 * e * c * v, d.act, 1)
        yield _added(f"{name}_dgrad_{tile}", d, c, h, v, Role.INPUT_GRADIENT)
        if trained:
            yield _added(f"{name}_wgrad_{tile}", d, v, h, c, Role.WEIGHT_GRADIENT)
    yield memory_op(f"{name}_dgrad_cast", I, "cast", rows * h, (FP32_BYTES + e) * rows * h, d.act)
    if trained:
        yield from _kept_gradient(d, name, size)


def _added(name: str, d: Dims, m: int, n: int, k: int, role: Role) -> Compute:
    """A product that cuBLAS adds to fp32 sums: they are read and written."""
    return gemm(name, I, m, n, k, d.act, out_bytes=2.0 * FP32_BYTES * m * n, role=role)


def _kept_gradient(d: Dims, name: str, size: int) -> Program:
    """The weight's gradient in the weight's dtype, fp32 under autocast, and its sum with those kept."""
    added = [replace(i, phase=W) for i in accumulation(d, f"{name}_wgrad", size)[1] if isinstance(i, Compute)]
    if d.autocast:
        return tuple(i for i in added if i.kind != "cast")
    return (memory_op(f"{name}_wgrad_cast", W, "cast", size, (FP32_BYTES + d.act_bytes) * size, d.act), *added)
