"""Count the query-key pairs of attention, of which FLOPs and scores in memory follow."""

from __future__ import annotations

from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

M = TypeVar("M", int, float, NDArray[np.float64])  # one number, or a column of many
# Which key the diagonal of a causal mask ends at, or begins at. last: the last query sees all keys, query i of q those
# up to kv − q + i (FlashAttention from 2.1 on, and all engines: keys of a cache come first). first: query i sees keys
# up to i (`is_causal` of torch.nn.functional.scaled_dot_product_attention). Without a cache q = kv, and both are one.
Alignment = Literal["last", "first"]


def attended_pairs(q_len: M, kv_len: M, causal: M | bool, aligned: Alignment = "last") -> M:
    """Return the pairs of one head: all q·kv, or those that a causal mask leaves, each query's own key among them.

    >>> attended_pairs(4, 4, True), attended_pairs(1, 4, True), attended_pairs(4, 4, False), attended_pairs(4, 2, True)
    (10, 4, 16, 3)
    >>> attended_pairs(1, 4, True, "first"), attended_pairs(4, 2, True, "first")
    (1, 7)
    """
    # Arithmetic instead of branches on `causal`, because arguments may be whole columns.
    pairs, shorter = q_len * kv_len, least(q_len, kv_len)
    if aligned == "last":
        return pairs - causal * (pairs - shorter * kv_len + shorter * (shorter - 1) // 2)
    return pairs - causal * (shorter * kv_len - shorter * (shorter + 1) // 2)


def half_diagonal_pairs(q_len: int, kv_len: int, aligned: Alignment = "last") -> float:
    """Return the pairs of one head under a causal mask with half of its diagonal: half of the square where q = kv.

    Published counts of FLOPs halve the square, and so do the kernels' speeds that follow from them (Dao 2023,
    arXiv:2307.08691, section 4.1).

    >>> half_diagonal_pairs(4, 4), half_diagonal_pairs(2, 4), half_diagonal_pairs(2, 4, "first")
    (8.0, 6.0, 2.0)
    """
    return attended_pairs(q_len, kv_len, True, aligned) - min(q_len, kv_len) / 2


def least(a: M, b: M) -> M:
    """Return the smaller of two numbers, or of each pair of two columns."""
    return np.minimum(a, b) if isinstance(a, np.ndarray) else min(a, b)
