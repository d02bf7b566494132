"""Muon: a matrix's momentum is made orthogonal before it moves the matrix (Jordan et al. 2024; Liu et al. 2025, arXiv
2502.16982, sections 2.1 and 2.3).

X of [m, n], m ≤ n, goes through five Newton-Schulz iterations in bf16: A = X Xᵀ, B = b·A + c·A A, X = a·X + B X, which
is 4·m²·n + 2·m³ flops each. Matrices of layers are updated so, everything else (embedding, output, norms, biases, the
router) by AdamW. One momentum is kept where AdamW keeps two moments.

With ZeRO-1 whole matrices are dealt out to the ranks (Megatron-Core's optimizer/layer_wise_optimizer.py), with tensor
parallelism each rank makes its own part orthogonal (its `blockwise` mode): no messages beside those of ZeRO-1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapreplace
from typing import NamedTuple

from msgspec.structs import replace

from sim.core.dtypes import MUON_DTYPE, dtype_bytes
from sim.core.program import Block, Compute, Phase, Program, Role, WeightShape
from sim.models.operators import gemm, memory_op

ITERATIONS = 5


class Dealt(NamedTuple):
    """Hold a rank's parameters as Muon sees them: whole `matrices` of layers, which it updates, and the number of
    others (`rest`), which AdamW does."""

    matrices: tuple[WeightShape, ...] = ()
    rest: int = 0


def dealt_out(blocks: Sequence[Block], shard: int, expert_shard: int, zero: int) -> Dealt:
    """A rank's part of its blocks.

    That is all of them, or with ZeRO the matrices of the rank with most work, for which all wait, and an even share of
    what is in no matrix.
    """
    found: dict[int, Counter[tuple[int, int]]] = {}
    others: Counter[int] = Counter()
    for block in blocks:
        parts = ((block.matrices, block.params, shard), (block.expert_matrices, block.expert_params, expert_shard))
        for shapes, params, sharing in parts:
            ranks = sharing if zero >= 1 else 1
            others[ranks] += params - sum(shape.elements for shape in shapes)
            for number, rows, columns in shapes:
                found.setdefault(ranks, Counter())[rows, columns] += number
    matrices = tuple(shape for ranks, shapes in found.items() for shape in _fullest(shapes, ranks))
    return Dealt(matrices, sum(-(-number // ranks) for ranks, number in others.items()))


def _fullest(shapes: Mapping[tuple[int, int], int], ranks: int) -> list[WeightShape]:
    """The matrices of the rank with most flops, where the next largest goes to the rank with the fewest elements.

    So does Megatron-Core (`_compute_per_buffer_param_layout`: "greedy LPT"), within each bucket of gradients; here all
    matrices are one bucket. `shapes`: how many there are of each.
    """
    if ranks == 1:
        return [WeightShape(number, *shape) for shape, number in shapes.items()]
    loads = [(0, rank) for rank in range(ranks)]
    dealt = [Counter[tuple[int, int]]() for _ in range(ranks)]
    for shape, number in sorted(shapes.items(), key=lambda item: item[0][0] * item[0][1], reverse=True):
        for _ in range(number):
            load, rank = loads[0]
            heapreplace(loads, (load + shape[0] * shape[1], rank))
            dealt[rank][shape] += 1
    ranked = [[WeightShape(number, *shape) for shape, number in rank.items()] for rank in dealt]
    return max(ranked, key=lambda held: sum(shape.number * _iteration_flops(shape) for shape in held))


def _iteration_flops(shape: WeightShape) -> int:
    """Flops of an iteration for one matrix."""
    m, n = sorted((shape.rows, shape.columns))
    return 4 * m * m * n + 2 * m**3


def muon_items(
    shapes: Sequence[WeightShape], grad_bytes: float, updated_bytes: float, moment_bytes: float, written_bytes: float
) -> Program:
    """The step of matrices. Bytes are those of an element: gradient, what is updated, momentum, and the low-precision
    parameter where the updated one is a master copy.

    Momentum: gradient read, momentum read and written, the look-ahead written in bf16; then its norm (read) and the
    division by it (2). Sums of an iteration: b·A + c·A² (3 of A), a·X + B X (3 of X). At the end the parameter is
    decayed and moved (the update read, the parameter read and written).
    """
    e, items = dtype_bytes(MUON_DTYPE), list[Compute]()
    for shape in shapes:
        number, m, n = shape.number, min(shape.rows, shape.columns), max(shape.rows, shape.columns)
        elements = number * m * n
        first, last = grad_bytes + 2 * moment_bytes + e + 3 * e, e + 2 * updated_bytes + written_bytes
        items.append(_pass("muon_momentum", elements, first, 3 * number))
        for _ in range(ITERATIONS):
            items += [
                _product("muon_gram", m, m, n, number),
                _product("muon_square", m, m, m, number),
                _pass("muon_polynomial", number * m * m, 3 * e, number),
                _product("muon_apply", m, n, m, number),
                _pass("muon_sum", elements, 3 * e, number),
            ]
        items.append(_pass("muon_update", elements, last, number))
    return tuple(items)


def _pass(name: str, elements: float, bytes_each: float, kernels: int) -> Compute:
    """Kernels over the elements of all matrices of one shape, a kernel or more for each matrix."""
    return memory_op(name, Phase.OPTIMIZER, "optimizer", elements, elements * bytes_each, MUON_DTYPE, kernels)


def _product(name: str, rows: int, columns: int, inner: int, number: int) -> Compute:
    """One product for each of `number` matrices of one shape: priced as a batch, launched one by one."""
    batch = gemm(name, Phase.OPTIMIZER, rows, columns, inner, MUON_DTYPE, number, role=Role.OUTPUT)
    return replace(batch, kernels=number)
