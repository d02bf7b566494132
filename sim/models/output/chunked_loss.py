"""Output matrix and loss in chunks of tokens, so that the logits of all never exist: Liger's fused linear
cross-entropy (Hsu et al. 2024, arXiv 2410.10989, section 3.2), and a loop of plain torch (`loss_chunks`).

In the forward each chunk's logits become their own gradient in place, and that at once the input's gradient and a part
of the weight's. Both wait for the backward, which only scales them: 6 flops a weight and token as ever, all in the
forward, and a pass over the weight's gradient for every chunk.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Comm, Compute, Item, NeededBy, Phase, Role, Saved
from sim.models.dims import Dims, ceil_div
from sim.models.operators import F, I, Operator, W, accumulation, collective, gemm, memory_op


def chunk_rows(rows: int, vocab: int, hidden: int) -> int:
    """Tokens of a chunk, as Liger chooses: its logits take about what the inputs of all tokens do.

    >>> chunk_rows(8192, 128256, 4096), chunk_rows(8192, 32000, 4096)
    (256, 1024)
    """
    return 1 << (ceil_div(rows, ceil_div(vocab, hidden)) - 1).bit_length()


def chunked_output(d: Dims, name: str, vocab: int) -> Operator:
    """`[tokens, hidden] x [hidden, vocab]`, loss and both gradients. Frozen weights get none."""
    rows, h, e, trained = d.tokens, d.hidden, d.act_bytes, d.lora is None
    size = vocab * h
    forward: list[Item] = []
    chunk = chunk_rows(rows, vocab, h)
    for i, start in enumerate(range(0, rows, chunk)):
        c = min(chunk, rows - start)
        forward += [
            gemm(f"{name}_{i}", F, c, vocab, h, d.act),
            memory_op(f"cross_entropy_{i}", F, "cross_entropy", c * vocab, 3 * e * c * vocab, d.act, 1),
            gemm(f"{name}_dgrad_{i}", F, c, h, vocab, d.act, role=Role.INPUT_GRADIENT),
        ]
        if trained:
            forward += [
                gemm(f"{name}_wgrad_{i}", F, vocab, h, c, d.act, role=Role.WEIGHT_GRADIENT),
                memory_op(f"{name}_wgrad_sum_{i}", F, "elementwise", size, 3 * e * size, d.act),
            ]
    backward: list[Item] = [memory_op(f"{name}_dgrad_scale", I, "elementwise", rows * h, 2 * e * rows * h, d.act)]
    if trained:
        backward.append(memory_op(f"{name}_wgrad_scale", W, "elementwise", size, 2 * e * size, d.act))
    return _output(d, name, vocab, forward, backward, e * (chunk * vocab + (size if trained else 0)))


def _output(
    d: Dims, name: str, vocab: int, forward: list[Item], backward: list[Item], temporary_bytes: float
) -> Operator:
    """The operator; its backward adds up the weight's gradient, which its forward made with that of its input."""
    rows, h, e, size = d.tokens, d.hidden, d.act_bytes, vocab * d.hidden
    saved = [Saved("input's gradient", e * rows * h)]
    if d.lora is None:
        backward = [*backward, *accumulation(d, f"{name}_wgrad", size)[1]]
        saved.append(Saved("weight's gradient", e * size, NeededBy.WEIGHT_GRAD))
    return Operator(
        name,
        tuple(forward),
        tuple(backward),
        tuple(saved),
        params=size,
        weights=((vocab, h),),
        forward_bytes=temporary_bytes,
        backward_bytes=e * rows * h,
    )


def looped_output(d: Dims, name: str, vocab: int, chunks: int, loss: Callable[[Dims], Operator]) -> Operator:
    """Output matrix, loss and their backward for one chunk of the micro-batch's tokens after the other, in a loop.

    torchtitan, components/loss.py, `ChunkedLossWrapper` (before, `ChunkedCELoss`): autograd runs in each chunk with the
    loss's own kernels, the inputs' gradients are collected in fp32, the weight's adds up in 16 bits. With tensor
    parallelism `vocab` is this rank's part: the chunks' losses are summed over the ranks, and the inputs' gradient once
    for all chunks. `loss`: the operator for sizes with a chunk's tokens.
    """
    rows, h, e, trained = d.tokens, d.hidden, d.act_bytes, d.lora is None
    size, chunk = vocab * h, ceil_div(rows, chunks)
    forward: list[Item] = []
    if d.tp > 1 and d.sp:
        forward.append(collective(f"{name}_gather", "all_gather", rows * h * e, F))
    for i, start in enumerate(range(0, rows, chunk)):
        c = min(chunk, rows - start)
        of_chunk = loss(replace(d, tokens=c))
        forward += [
            gemm(f"{name}_{i}", F, c, vocab, h, d.act),
            *(_in_phase(F, item) for item in (*of_chunk.forward, *of_chunk.backward)),
            gemm(f"{name}_dgrad_{i}", F, c, h, vocab, d.act, role=Role.INPUT_GRADIENT),
            memory_op(f"{name}_dgrad_collect_{i}", F, "cast", c * h, (e + FP32_BYTES) * c * h, d.act),
        ]
        if trained:
            forward.append(gemm(f"{name}_wgrad_{i}", F, vocab, h, c, d.act, role=Role.WEIGHT_GRADIENT))
        if trained and i > 0:
            forward.append(memory_op(f"{name}_wgrad_sum_{i}", F, "elementwise", size, 3 * e * size, d.act))
    forward.append(memory_op(f"{name}_dgrad_cast", F, "cast", rows * h, (e + FP32_BYTES) * rows * h, d.act))
    backward: list[Item] = []
    if d.tp > 1:
        kind = "reduce_scatter" if d.sp else "all_reduce"
        backward.append(collective(f"{name}_dgrad_{kind}", kind, rows * h * e, I))
    largest = loss(replace(d, tokens=min(chunk, rows)))
    logits = sum(kept.bytes for kept in largest.saved) + max(largest.forward_bytes, largest.backward_bytes)
    again = e * size if trained and chunk < rows else 0
    gathered = e * rows * h if d.tp > 1 and d.sp else 0
    return _output(d, name, vocab, forward, backward, logits + again + FP32_BYTES * rows * h + gathered)


def _in_phase(phase: Phase, item: Item) -> Item:
    return replace(item, phase=phase) if isinstance(item, Compute | Comm) else item
