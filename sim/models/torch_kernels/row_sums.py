"""Sums over the rows of a matrix, such as a bias's gradient, as torch runs them on a GPU."""

from __future__ import annotations

FEW_COLUMNS = 8192  # a sum over the rows of so many columns keeps an H100 busy


def summed_rows(rows: float, columns: float) -> float:
    """Return the rows that one thread block adds up before it waits for the others.

    The more columns there are, the fewer blocks share a column's rows (ATen/native/cuda/Reduce.cuh: setReduceConfig).

    >>> summed_rows(8192, 1024), summed_rows(8192, 32768)
    (8192.0, 2048.0)
    """
    return rows * min(1.0, FEW_COLUMNS / max(1.0, columns))
