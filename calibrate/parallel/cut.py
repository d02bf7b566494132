"""How tensor parallelism cuts a layer over ranks, and what brings the parts together again.

Documentation: docs/tensor_parallel.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from calibrate.linear import as_rows
from calibrate.parallel.comm import Group


@dataclass(frozen=True, slots=True)
class Cut:
    """How a layer is cut: over which ranks, with sequence parallelism or not, for a micro-batch of `batch`
    sequences, whether a backward's communication runs beside the weight gradient (`overlap`), and whether all of it
    runs beside matmuls in chunks of tokens (`chunked`).
    """

    group: Group
    sequence: bool
    batch: int
    overlap: bool = False
    chunked: bool = False

    def gather(self, x: Tensor) -> Tensor:
        """This rank's tokens [rows, h] → all [b, s, h]; without sequence parallelism they are all here."""
        return self._tokens(self.group.all_gather(x)) if self.sequence else x

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """As `gather`, asynchronous: call what it returns."""
        if not self.sequence:
            return lambda: x
        pending = self.group.start_all_gather(x)
        return lambda: self._tokens(pending.wait())

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks of [b, s, h]: all of it, or this rank's tokens [rows, h]. `x` may be overwritten."""
        return self.start_sum(x, blocking=True)()

    def start_sum(self, x: Tensor, blocking: bool = False) -> Callable[[], Tensor]:
        """As `sum`, asynchronous: call what it returns."""
        if self.sequence:
            return self.group.start_reduce_scatter(as_rows(x), blocking).wait
        return self.group.start_all_reduce(x.contiguous(), blocking=blocking).wait

    def _tokens(self, rows: Tensor) -> Tensor:
        return rows.view(self.batch, -1, rows.shape[-1])

    def share(self, n: int) -> slice:
        """This rank's share of n things."""
        each = n // self.group.size
        return slice(self.group.index * each, (self.group.index + 1) * each)
