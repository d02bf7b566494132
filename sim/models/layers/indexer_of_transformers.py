"""DeepSeek's indexer as Transformers computes it: in separate operators, scores of all pairs in fp32.

`torch.matmul` multiplies each query's heads by the keys of its sequence. Its batches are queries, so with several
sequences it first copies the keys once for each query; one sequence's queries all read the same keys
(`DeepseekV32Indexer` in transformers/models/deepseek_v32/modular_deepseek_v32.py;
aten/src/ATen/native/LinearAlgebra.cpp: _matmul_impl; `tests/real/test_copied_keys.py`).
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Program
from sim.models.operators import F, gemm, memory_op
from sim.models.torch_kernels.top_k import several_block_kernels, several_blocks_choose, top_k_clocks

INDEX_BYTES = 4.0  # a selected key's place
PLACE_BYTES = 8.0  # as torch.topk finds it
# A mask of truths from the scores' device: inverted (1.5 of each pair, one of all sequences), a copy of the scores (8)
# that is filled (9). A mask of numbers is added by one kernel.
MASKED, MASK_ADDED = (18.5, 3), (2.0 * FP32_BYTES, 1)


def separate_rope(rotated: float, whole: float, act: tuple[str, float]) -> Program:
    """Rope over `rotated` of the `whole` numbers of queries and keys: two products, a negation, a join and a sum of
    each, and a join with the rest. Products, and half of the others, run one number at a time."""
    dtype, size = act
    made = memory_op("index_rope", F, "elementwise", rotated, (10 * rotated + 2 * whole) * size, dtype, 12)
    return (replace(made, single_elements=3.5 * rotated + whole),)


def selection_mask(pairs: float, chosen: float) -> Compute:
    """What makes a mask of the `chosen` places: ones, the places widened, zeros scattered to them into a copy, its
    inverse joined with the causal mask, beside what makes numbers of any mask (`DeepseekV32Attention.forward`)."""
    return memory_op("index_attention_mask", F, "elementwise", pairs, 8 * pairs + 28 * chosen, "fp32", 6)


def _selection(queries: int, row: int, chosen: float) -> Compute:
    """torch.topk of every query's scores, and its places cast to 32 bits."""
    pairs, several = float(queries * row), several_blocks_choose(queries, row)
    reads, further = (FP32_BYTES + 1, several_block_kernels(int(FP32_BYTES))) if several else (1, 1)
    moved = reads * FP32_BYTES * pairs + (3 * (FP32_BYTES + PLACE_BYTES) + PLACE_BYTES + INDEX_BYTES) * chosen
    made = memory_op("index_select", F, "softmax", pairs, moved, "fp32", 2 + further)
    return replace(made, clocks=0.0 if several else top_k_clocks(queries, row, round(chosen / queries), narrow=False))


def separate_scores(
    sizes: tuple[int, int], rows: tuple[int, int, int], act: tuple[str, float], chosen: float, truths: bool = True
) -> Program:
    """Return the operators of scores and selection.

    `sizes`: heads and their width; `rows`: sequences, queries and keys of each; `act`: dtype and bytes of activations;
    `chosen`: keys of all queries; `truths`: the causal mask has truths, as torch's own attention takes them, not
    numbers.
    """
    (heads, width), (batch, q_len, kv_len), (dtype, size) = sizes, rows, act
    queries = batch * q_len
    copied, of_heads, pairs = (float(queries * n * kv_len) for n in (width, heads, 1))
    widened = float(queries * heads * width + batch * kv_len * width)
    copies = replace(
        memory_op("index_key_copies", F, "permute", copied, FP32_BYTES * copied, "fp32"), single_elements=copied
    )
    weights, (masked, mask_kernels) = float(queries * heads), MASKED if truths else MASK_ADDED
    return (
        memory_op("index_weights_scale", F, "elementwise", weights, (size + 3 * FP32_BYTES) * weights, "fp32", 2),
        memory_op("index_cast", F, "cast", widened, (size + FP32_BYTES) * widened, dtype, 2),
        *((copies,) if batch > 1 else ()),
        gemm("index_scores", F, heads, kv_len, width, "fp32", queries),
        memory_op("index_scale_relu", F, "elementwise", of_heads, 4 * FP32_BYTES * of_heads, "fp32", 2),
        gemm("index_weighting", F, 1, kv_len, heads, "fp32", queries),
        memory_op("index_mask", F, "elementwise", pairs, masked * pairs, "fp32", mask_kernels),
        _selection(queries, kv_len, chosen),
    )


def separate_bytes(sizes: tuple[int, int], rows: tuple[int, int, int]) -> float:
    """Return what lives at once while the scores are computed: the scores of all heads, and beside them the copies of
    the keys or the same scores before they are scaled."""
    (heads, width), (batch, q_len, kv_len) = sizes, rows
    return FP32_BYTES * batch * q_len * kv_len * (heads + max(heads, width if batch > 1 else 0))
