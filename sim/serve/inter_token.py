"""Seconds between one token of a request and its next, over all tokens: what somebody who reads along sees."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sim.serve.records import Percentiles
from sim.serve.replica import Replica


class TokenGaps(Struct, frozen=True, eq=False):
    """Gaps in ascending order and the tokens that came after each, both [gaps]; `below` sums tokens up to each."""

    seconds: NDArray[np.float64]
    tokens: NDArray[np.float64]
    below: NDArray[np.float64]

    def quantile(self, share: float) -> float:
        """The shortest gap that so large a share of all tokens does not exceed."""
        return float(self.seconds[np.searchsorted(self.below, share * self.below[-1])])


def token_gaps(replicas: tuple[Replica, ...], pp: int) -> TokenGaps | None:
    """The gaps before every token but a request's first; None where no request has a second.

    A sequence that adds a token in an iteration added its last one in the iteration before, with a pipeline in the
    pp-th before, so the gap is the time between their ends; the steps of a run of alike iterations share its time.
    Where nobody could compute before, its last one is older than that iteration, and the gap begins as this one is put
    together: what a preempted sequence waits for is not among them. A sequence whose prompt another replica computed
    has its first token from there, so the gap before its second one holds its waits and the transfer of its cache.
    """
    gaps: list[float] = []
    tokens: list[int] = []
    for replica in replicas:
        ends = [0.0] * pp
        for number, iteration in enumerate(replica.iterations):
            start, end = iteration.spans[0][0], iteration.spans[-1][1]
            if iteration.load.decodes:
                since = ends[number % pp] if iteration.steps == 1 else start
                since = since if iteration.since_s is None else iteration.since_s
                handed_over_s = iteration.handed_over_s
                if more := iteration.load.decodes * iteration.steps - len(handed_over_s):
                    gaps.append((end - since) / iteration.steps)
                    tokens.append(more)
                for first_s in handed_over_s:
                    gaps.append(end - first_s)
                    tokens.append(1)
            ends[number % pp] = end
    if not gaps:
        return None
    order = np.argsort(gaps)
    weights = np.array(tokens, dtype=float)[order]
    return TokenGaps(np.array(gaps)[order], weights, np.cumsum(weights))


def inter_token_latency(replicas: tuple[Replica, ...], pp: int) -> Percentiles:
    """Percentiles over `token_gaps`; zeros where there are none."""
    gaps = token_gaps(replicas, pp)
    if gaps is None:
        return Percentiles(0.0, 0.0, 0.0, 0.0)
    mean = float((gaps.seconds * gaps.tokens).sum() / gaps.below[-1])
    return Percentiles(gaps.quantile(0.5), gaps.quantile(0.9), gaps.quantile(0.99), mean)
