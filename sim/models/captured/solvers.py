"""Captured solvers of linear equations: FLOPs as those of a matmul, and a triangular solver's steps in turn.

On a GPU torch solves more than eight triangular matrices by cuBLAS's `trsmBatched` (ATen/native/cuda/linalg/
BatchLinearAlgebra.cpp: triangular_solve_kernel). A row of a solution waits for the rows before it, so the kernel is
bound by these steps, not by its FLOPs: 26 times as long for matrices of 64 x 64.
"""

from __future__ import annotations

import math

from sim.core.program import Compute, Phase
from sim.inputs.program_file import CapturedOperator

# FLOPs of a solver: so many n³ of an n × n matrix, and n² k of k right-hand sides (LAPACK Working Note 41, appendix C;
# eigenvectors and singular vectors: Golub and Van Loan, Matrix Computations, 8.3.3 and 8.6.4).
SOLVERS = {
    "aten.linalg_solve_triangular": (0.0, 1.0),
    "aten.triangular_solve": (0.0, 1.0),
    "aten._linalg_solve_ex": (2 / 3, 2.0),
    "aten.cholesky_solve": (0.0, 2.0),
    "aten.linalg_lu_solve": (0.0, 2.0),
    "aten.linalg_lu_factor_ex": (2 / 3, 0.0),
    "aten.linalg_lu": (2 / 3, 0.0),
    "aten.linalg_inv_ex": (2.0, 0.0),
    "aten.linalg_cholesky_ex": (1 / 3, 0.0),
    "aten.linalg_qr": (8 / 3, 0.0),
    "aten._linalg_eigh": (9.0, 0.0),
    "aten._linalg_svd": (22.0, 0.0),
    "aten.linalg_pinv": (24.0, 0.0),  # singular values, and a product (native/LinearAlgebra.cpp: linalg_pinv)
    "aten.linalg_matrix_exp": (10.0, 0.0),  # five products; squarings are unknown (LinearAlgebra.cpp: compute_T18)
    "aten._linalg_det": (2 / 3, 0.0),
    "aten._linalg_slogdet": (2 / 3, 0.0),
}
RIGHT_SIDES_FIRST = ("aten.triangular_solve", "aten.cholesky_solve")  # before the matrix
TRIANGULAR = "aten.linalg_solve_triangular"
IN_TURN = 8  # matrices of 64 and more rows that cuBLAS solves by one call each
LOOPED_ROWS = 64
# Clocks of a multiprocessor for each element of a solution, torch 2.11 on an H200 at 1.98 GHz: 7.2 to 8.4 for 512 and
# 2,048 matrices of 64 and of 128 rows in fp32 (scenarios/measured/gpu_kernels/h200.json).
SOLVED_CLOCKS = 7.8


def solver(op: CapturedOperator, phase: Phase) -> Compute:
    """Return a solver as the matmul of as many FLOPs, to k columns.

    >>> from sim.inputs.program_file import Tensor
    >>> x = Tensor("fp32", (2048, 64, 64), ())
    >>> found = solver(CapturedOperator(TRIANGULAR, "forward", "", (x, x), (x,), 1, False), Phase.FORWARD)
    >>> round(found.clocks / 132 / 1.98e3)  # microseconds on an H200; measured: 232
    250
    """
    cubes, squares = SOLVERS[op.name]
    matrix = op.inputs[1 if op.name in RIGHT_SIDES_FIRST else 0]
    n, rows = sorted(matrix.shape[-2:])  # of a wide matrix the transposed one is factored
    count = math.prod(matrix.shape[:-2])
    # Right-hand sides may lie in rows (`left=False`), and one alone may be a vector.
    columns = max(1, op.outputs[0].elements // (count * n)) if squares and op.outputs else n
    inner = max(1, math.ceil((cubes * n * n + squares * n * columns) / (2 * columns)))
    shape = (count, rows, columns, inner)
    moved = float(sum(x.bytes for x in (*op.inputs, *op.outputs)))
    clocks = _clocks(op) if op.name == TRIANGULAR else 0.0
    return Compute(op.name, "gemm", shape, matrix.dtype, 2.0 * math.prod(shape), moved, phase, clocks=clocks)


def _clocks(op: CapturedOperator) -> float:
    """Return the clocks of `trsmBatched`; none are known of the kernels that solve few large matrices."""
    matrix = op.inputs[0]
    if not op.outputs or (math.prod(matrix.shape[:-2]) <= IN_TURN and matrix.shape[-1] >= LOOPED_ROWS):
        return 0.0
    return SOLVED_CLOCKS * op.outputs[0].elements
