"""A communication that has been started and not waited for, and its record.

Documentation: docs/data_parallel.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch.distributed as dist

from calibrate.parallel.data import Sent, Traffic
from calibrate.parallel.pipeline import Record


@dataclass(slots=True)
class Running:
    """A communication under way, and its index among the records."""

    records: list[Record]
    index: int
    traffic: Traffic
    sent: Sent
    work: dist.Work
    tells: bool = False

    def watched(self) -> Running:
        """Let the end be recorded when it happens; gloo's reduce-scatter hides it, so there the wait's end counts."""
        try:
            self.work.get_future().add_done_callback(lambda _: self.ended())
            self.tells = True
        except RuntimeError:
            pass
        return self

    def ended(self) -> None:
        """Record now as the end."""
        self.records[self.index] = self.records[self.index]._replace(end_ns=time.perf_counter_ns())

    def wait(self) -> None:
        """Wait for the communication."""
        self.traffic.wait(self.work, self.sent, self.records[self.index].start_ns)
        if not self.tells:
            self.ended()
