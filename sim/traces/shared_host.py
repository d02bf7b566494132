"""Collectives that run on the cores that compute, as gloo's do: while both run, both are slower."""

from __future__ import annotations

from collections.abc import Hashable


class SharedHost:
    """Follow one rank, whose collectives of a queue run one after the other while it computes.

    `compute_slowdown`, `comm_slowdown`: seconds beside the other ÷ seconds alone. `took_s`: seconds of each collective.

    >>> host = SharedHost(2.0, 3.0)
    >>> host.start(0, "all ranks", 1.0)
    >>> host.compute(5.0)  # 3 s beside the collective compute as much as 1.5 s alone
    6.5
    >>> host.took_s
    {0: 3.0}
    """

    def __init__(self, compute_slowdown: float, comm_slowdown: float) -> None:
        self.compute_slowdown, self.comm_slowdown = compute_slowdown, comm_slowdown
        self.took_s: dict[int, float] = {}
        self._queues: dict[Hashable, list[int]] = {}
        self._queue_of: dict[int, Hashable] = {}
        self._left_s: dict[int, float] = {}  # seconds alone of collectives that have not ended

    def start(self, collective: int, queue: Hashable, seconds: float) -> None:
        """Start a collective behind those of its queue."""
        self.took_s[collective], self._left_s[collective], self._queue_of[collective] = 0.0, seconds, queue
        self._queues.setdefault(queue, []).append(collective)

    def compute(self, seconds: float) -> float:
        """Return the seconds that a computation takes beside the collectives that run."""
        took_s = 0.0
        while seconds > 0 and self._left_s:
            ends_s = min(self._left_s[c] for c in self._running()) * self.comm_slowdown
            step_s = min(ends_s, seconds * self.compute_slowdown)
            self._advance(step_s, self.comm_slowdown)
            seconds -= step_s / self.compute_slowdown
            took_s += step_s
            if step_s < ends_s:
                return took_s
        return took_s + max(seconds, 0.0)

    def wait(self, collective: int) -> None:
        """Let the collectives run without computation until this one has ended."""
        while collective in self._left_s:
            self._advance(min(self._left_s[c] for c in self._running()), 1.0)

    def finish(self) -> None:
        """Let all collectives end."""
        for collective in list(self._left_s):
            self.wait(collective)

    def _running(self) -> list[int]:
        return [queue[0] for queue in self._queues.values()]

    def _advance(self, step_s: float, slowdown: float) -> None:
        """Let time pass; a collective with less than a picosecond left has ended, because sums are rounded."""
        for c in self._running():
            self.took_s[c] += step_s
            self._left_s[c] -= step_s / slowdown
            if self._left_s[c] <= 1e-12:
                queue = self._queues[self._queue_of[c]]
                queue.pop(0)
                del self._left_s[c]
                if not queue:
                    del self._queues[self._queue_of[c]]
