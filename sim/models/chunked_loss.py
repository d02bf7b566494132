"""Output matrix and loss in chunks of tokens, so that the logits of all never exist (Liger's fused linear
cross-entropy, Hsu et al. 2024, arXiv 2410.10989, section 3.2).

In the forward each chunk's logits become their own gradient in place, and that at once the input's gradient and a part
of the weight's. Both wait for the backward, which only scales them: 6 flops a weight and token as ever, all in the
forward, and a pass over the weight's gradient for every chunk.
"""

from __future__ import annotations

from sim.core.program import Item, NeededBy, Role, Saved
from sim.models.dims import Dims, ceil_div
from sim.models.operators import F, I, Operator, W, accumulation, gemm, memory_op


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
    saved = [Saved("input's gradient", e * rows * h)]
    if trained:
        backward += [
            memory_op(f"{name}_wgrad_scale", W, "elementwise", size, 2 * e * size, d.act),
            *accumulation(d, f"{name}_wgrad", size)[1],
        ]
        saved.append(Saved("weight's gradient", e * size, NeededBy.WEIGHT_GRAD))
    temporary = e * (chunk * vocab + (size if trained else 0))
    return Operator(
        name,
        tuple(forward),
        tuple(backward),
        tuple(saved),
        params=size,
        weights=((vocab, h),),
        forward_bytes=temporary,
        backward_bytes=e * rows * h,
    )
