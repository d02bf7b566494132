"""Tensor parallelism: the split of a layer over ranks, and the communication that combines the parts.

Documentation: docs/tensor_parallel.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from calibrate.bundled_model.linear import as_rows
from calibrate.parallel.comm import Group


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """The split of a layer over the ranks of `group`, for a micro-batch of `batch` sequences.

    `sequence`: with sequence parallelism. `overlap`: a backward's communication runs beside the weight gradient.
    `chunked`: all communication runs beside matmuls, in chunks of tokens.
    """

    group: Group
    sequence: bool
    batch: int
    overlap: bool = False
    chunked: bool = False

    def gather(self, x: Tensor) -> Tensor:
        """Gather this rank's tokens [rows, h] → all tokens [b, s, h]; nothing to do without sequence parallelism."""
        return self._tokens(self.group.all_gather(x)) if self.sequence else x

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Start a `gather`; call the result to wait for it."""
        if not self.sequence:
            return lambda: x
        pending = self.group.start_all_gather(x)
        return lambda: self._tokens(pending.wait())

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x` [b, s, h] over the ranks; `x` may be overwritten.

        Returns all of it, or with sequence parallelism this rank's tokens [rows, h].
        """
        return self.start_sum(x, blocking=True)()

    def start_sum(self, x: Tensor, blocking: bool = False) -> Callable[[], Tensor]:
        """Start a `sum`; call the result to wait for it."""
        if self.sequence:
            return self.group.start_reduce_scatter(as_rows(x), blocking).wait
        return self.group.start_all_reduce(x.contiguous(), blocking=blocking).wait

    def _tokens(self, rows: Tensor) -> Tensor:
        return rows.view(self.batch, -1, rows.shape[-1])

    def share(self, n: int) -> slice:
        """Return this rank's share of n items."""
        each = n // self.group.size
        return slice(self.group.index * each, (self.group.index + 1) * each)
