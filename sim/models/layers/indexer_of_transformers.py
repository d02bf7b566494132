"""The scores of DeepSeek's indexer as Transformers computes them: in separate operators, of all pairs, in fp32.

`torch.matmul` multiplies each query's heads by the keys of its sequence. Its batches are queries, so with several
sequences it first copies the keys once for each query; one sequence's queries all read the same keys
(`DeepseekV32Indexer` in transformers/models/deepseek_v32/modular_deepseek_v32.py;
aten/src/ATen/native/LinearAlgebra.cpp: _matmul_impl; `tests/real/test_copied_keys.py`).
"""

from __future__ import annotations

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import Program
from sim.models.operators import F, gemm, memory_op

SELECT_READS = 3.0  # of the scores, by a selection


def separate_scores(
    sizes: tuple[int, int], rows: tuple[int, int, int], act: tuple[str, float], chosen_bytes: float
) -> Program:
    """Return the operators of scores and selection.

    `sizes`: heads and their width; `rows`: sequences, queries and keys of each; `act`: dtype and bytes of activations;
    `chosen_bytes`: of the chosen keys' places.
    """
    (heads, width), (batch, q_len, kv_len), (dtype, size) = sizes, rows, act
    queries = batch * q_len
    copied, of_heads, pairs = (float(queries * n * kv_len) for n in (width, heads, 1))
    widened = float(queries * heads * width + batch * kv_len * width)
    copies = replace(
        memory_op("index_key_copies", F, "permute", copied, FP32_BYTES * copied, "fp32"), single_elements=copied
    )
    return (
        memory_op("index_cast", F, "cast", widened, (size + FP32_BYTES) * widened, dtype, 2),
        *((copies,) if batch > 1 else ()),
        gemm("index_scores", F, heads, kv_len, width, "fp32", queries),
        memory_op("index_scale_relu", F, "elementwise", of_heads, 4 * FP32_BYTES * of_heads, "fp32", 2),
        gemm("index_weighting", F, 1, kv_len, heads, "fp32", queries),
        memory_op("index_mask", F, "elementwise", pairs, 2 * FP32_BYTES * pairs, "fp32"),
        memory_op("index_select", F, "softmax", pairs, SELECT_READS * FP32_BYTES * pairs + chosen_bytes, "fp32"),
    )


def separate_bytes(sizes: tuple[int, int], rows: tuple[int, int, int]) -> float:
    """Return what lives at once while the scores are computed: the scores of all heads, and beside them the copies of
    the keys or the same scores before they are scaled."""
    (heads, width), (batch, q_len, kv_len) = sizes, rows
    return FP32_BYTES * batch * q_len * kv_len * (heads + max(heads, width if batch > 1 else 0))
