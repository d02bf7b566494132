"""MiniMax M3's selection of blocks as Transformers computes it: in separate operators, scores of all pairs in fp32, and
a mask of each query head.

transformers/models/minimax_m3_vl/modeling_minimax_m3_vl.py: MiniMaxM3VLIndexer, and MiniMaxM3VLAttention without its
own kernels. torch's attention gets the mask as numbers, [batch, heads, queries, keys], which a layer keeps.
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Compute, Program
from sim.models.layers.indexer_of_transformers import separate_rope
from sim.models.operators import F, gemm, memory_op
from sim.models.torch_kernels.top_k import top_k_clocks

# A block's score and place: the own block raised (4), the largest found (1 + 3·12), places of hidden ones replaced (5,
# 8, 9 and again), written to zeros for all blocks, compared with them.
BLOCK_BYTES, BLOCK_KERNELS = 100.0, 16


def separate_block_scores(
    sizes: tuple[int, int, int], rows: tuple[int, int, int], act: tuple[str, float]
) -> tuple[Compute, ...]:
    """Return rope, scores and the choice of blocks. `sizes`: index heads, their width and a block's tokens; `rows`:
    sequences, queries and keys of each; `act`: dtype and bytes of activations.

    Each head's scores are masked in a copy (8 and 8.25 bytes), and a block's is its largest.
    """
    (heads, width, block), (batch, q_len, kv_len), (dtype, size) = sizes, rows, act
    queries, pairs = float(batch * q_len * heads * width), float(batch * q_len * kv_len)
    keys, scored = float(batch * kv_len * width), heads * float(batch * q_len * kv_len)
    blocks = -(-kv_len // block)
    copies = memory_op("index_key_copies", F, "permute", heads * keys, FP32_BYTES * (heads + 1) * keys, "fp32")
    masked = memory_op("index_mask", F, "elementwise", scored, 16 * scored + 2 * pairs, "fp32", 4)
    chosen = memory_op(
        "index_select", F, "softmax", scored / block, BLOCK_BYTES * scored / block, "fp32", BLOCK_KERNELS
    )
    rope: Program = separate_rope(queries + keys, queries + keys, act)
    return (
        *(i for i in rope if isinstance(i, Compute)),
        memory_op("index_cast", F, "cast", queries + keys, (size + FP32_BYTES) * (queries + keys), dtype, 2),
        replace(copies, single_elements=keys),
        gemm("index_scores", F, q_len, kv_len, width, "fp32", batch * heads),
        replace(masked, single_elements=scored + pairs),
        memory_op("index_largest", F, "elementwise", scored, FP32_BYTES * scored, "fp32"),
        replace(chosen, clocks=top_k_clocks(batch * q_len * heads, blocks, 2, narrow=False)),
    )


def block_mask(pairs: float, choices: int, heads: int) -> Compute:
    """Return what makes truths of `pairs` of tokens and each head from chosen blocks: the causal mask (4), a block's
    truth copied to its tokens and to its heads, and both joined (2)."""
    moved = (4 + 2 * choices + 3 * heads) * pairs
    made = memory_op("index_attention_mask", F, "elementwise", pairs * heads, moved, "fp32", 6)
    return replace(made, single_elements=(choices + 2 * heads) * pairs)
