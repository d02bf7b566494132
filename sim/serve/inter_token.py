"""Seconds between one token of a request and its next, over all tokens: what somebody who reads along sees."""

from __future__ import annotations

import numpy as np

from sim.serve.records import Percentiles
from sim.serve.replica import Replica


def inter_token_latency(replicas: tuple[Replica, ...], pp: int) -> Percentiles:
    """Percentiles over the gaps before every token but a request's first.

    A sequence that adds a token in an iteration added its last one in the iteration before, with a pipeline in the
    pp-th before, so the gap is the time between their ends; the steps of a run of alike iterations share its time. What
    a preempted sequence waits for is not among them.
    """
    gaps: list[float] = []
    tokens: list[int] = []
    for replica in replicas:
        ends = [0.0] * pp
        for number, iteration in enumerate(replica.iterations):
            start, end = iteration.spans[0][0], iteration.spans[-1][1]
            if iteration.load.decodes:
                since = ends[number % pp] if iteration.steps == 1 else start
                gaps.append((end - since) / iteration.steps)
                tokens.append(iteration.load.decodes * iteration.steps)
            ends[number % pp] = end
    if not gaps:
        return Percentiles(0.0, 0.0, 0.0, 0.0)
    order = np.argsort(gaps)
    sorted_s, weights = np.array(gaps)[order], np.array(tokens, dtype=float)[order]
    below = np.cumsum(weights)
    p50, p90, p99 = (float(sorted_s[np.searchsorted(below, share * below[-1])]) for share in (0.5, 0.9, 0.99))
    return Percentiles(p50, p90, p99, float(sorted_s @ weights / below[-1]))
