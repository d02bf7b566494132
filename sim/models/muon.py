"""Muon: a matrix's momentum is made orthogonal before it moves the matrix (Jordan et al. 2024; Liu et al. 2025, arXiv
2502.16982, sections 2.1 and 2.3).

X of [m, n], m ≤ n, goes through five Newton-Schulz iterations in bf16: A = X Xᵀ, B = b·A + c·A A, X = a·X + B X, which
is 4·m²·n + 2·m³ flops each. Matrices of layers are updated so, everything else (embedding, output, norms, biases, the
router) by AdamW. One momentum is kept where AdamW keeps two moments.

With ZeRO-1 whole matrices are dealt out to the ranks (Megatron-Core's layer-wise optimizer), with tensor parallelism
each rank makes its own part orthogonal (its `blockwise` mode): no messages beside those of ZeRO-1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from sim.core.dtypes import dtype_bytes
from sim.core.program import Block, Compute, Phase, Program, Role, WeightShape
from sim.models.operators import gemm, memory_op

ITERATIONS = 5
DTYPE = "bf16"


class Dealt(NamedTuple):
    """What of a rank's parameters Muon updates: layers' matrices, whole ones; `rest`: how many others it has."""

    matrices: tuple[WeightShape, ...] = ()
    rest: int = 0


def dealt_out(blocks: Sequence[Block], shard: int, expert_shard: int, zero: int) -> Dealt:
    """This rank's part of its blocks: all, or with ZeRO of each shape as many matrices as any of the ranks that share
    them has, and an even share of what is in no matrix."""
    found: Counter[tuple[int, int, int]] = Counter()
    others: Counter[int] = Counter()
    for block in blocks:
        parts = ((block.matrices, block.params, shard), (block.expert_matrices, block.expert_params, expert_shard))
        for shapes, params, sharing in parts:
            ranks = sharing if zero >= 1 else 1
            others[ranks] += params - sum(shape.elements for shape in shapes)
            for number, rows, columns in shapes:
                found[rows, columns, ranks] += number
    matrices = (WeightShape(-(-number // ranks), rows, columns) for (rows, columns, ranks), number in found.items())
    return Dealt(tuple(matrices), sum(-(-number // ranks) for ranks, number in others.items()))


def muon_items(
    shapes: Sequence[WeightShape], grad_bytes: float, updated_bytes: float, moment_bytes: float, written_bytes: float
) -> Program:
    """The step of matrices. Bytes are those of an element: gradient, what is updated, momentum, and the low-precision
    parameter where the updated one is a master copy.

    Momentum: gradient read, momentum read and written, the look-ahead written in bf16; then its norm (read) and the
    division by it (2). Sums of an iteration: b·A + c·A² (3 of A), a·X + B X (3 of X). At the end the parameter is
    decayed and moved (the update read, the parameter read and written).
    """
    e, items = dtype_bytes(DTYPE), list[Compute]()
    for shape in shapes:
        number, m, n = shape.number, min(shape.rows, shape.columns), max(shape.rows, shape.columns)
        elements = number * m * n

        def pass_(name: str, count: float, bytes_: float, kernels: int = 1, number: int = number) -> Compute:
            return memory_op(name, Phase.OPTIMIZER, "optimizer", count, count * bytes_, DTYPE, number * kernels)

        def product(name: str, rows: int, columns: int, inner: int, number: int = number) -> Compute:
            plain = gemm(name, Phase.OPTIMIZER, rows, columns, inner, DTYPE, number, role=Role.OUTPUT)
            return replace(plain, kernels=number)

        items.append(pass_("muon_momentum", elements, grad_bytes + 2 * moment_bytes + e + 3 * e, 3))
        for _ in range(ITERATIONS):
            items += [
                product("muon_gram", m, m, n),
                product("muon_square", m, m, m),
                pass_("muon_polynomial", number * m * m, 3 * e),
                product("muon_apply", m, n, m),
                pass_("muon_sum", elements, 3 * e),
            ]
        items.append(pass_("muon_update", elements, e + 2 * updated_bytes + written_bytes))
    return tuple(items)
