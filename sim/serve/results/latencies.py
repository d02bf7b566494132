"""How long each request of a served workload took, and each token."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sim.serve.replicas.replica import Replica
from sim.serve.results.records import Percentiles
from sim.serve.scheduling.sequences import Sequence

Seconds = NDArray[np.float64]


class RequestTimes(Struct, frozen=True, eq=False):
    """Seconds of each request, [requests]; `per_output_token_s` is [requests with more than one output token]."""

    latency_s: Seconds  # arrival to last token
    queue_s: Seconds  # arrival to first admission
    first_token_s: Seconds  # arrival to first token
    per_output_token_s: Seconds  # mean of the gaps between a request's own tokens


def request_times(sequences: Items[Sequence], before_s: float) -> RequestTimes:
    """Times of `sequences`, in their order. Each takes `before_s` before it reaches the engine."""
    arrival, admitted, first, finish = np.array(
        [(s.arrival_s, s.admitted_s, s.first_token_s, s.finish_s) for s in sequences]
    ).T
    # The first token is no step of decoding, so one less than the output divides.
    gaps = np.array([s.request.output_tokens - 1 for s in sequences])
    several = gaps > 0
    return RequestTimes(
        latency_s=before_s + finish - arrival,
        queue_s=admitted - arrival,
        first_token_s=before_s + first - arrival,
        per_output_token_s=(finish - first)[several] / gaps[several],
    )


class TokenGaps(Struct, frozen=True, eq=False):
    """Seconds between one token of a request and its next, over all tokens: what somebody who reads along sees. Gaps
    in ascending order and the tokens that came after each, both [gaps]; `below` sums tokens up to each."""

    seconds: Seconds
    tokens: NDArray[np.float64]
    below: NDArray[np.float64]

    @property
    def percentiles(self) -> Percentiles:
        """Percentiles over all tokens."""
        mean = float((self.seconds * self.tokens).sum() / self.below[-1])
        p50, p90, p95, p99 = (self.quantile(share) for share in (0.5, 0.9, 0.95, 0.99))
        return Percentiles(p50, p90, p95, p99, mean)

    def quantile(self, share: float) -> float:
        """The shortest gap that so large a share of all tokens does not exceed."""
        return float(self.seconds[np.searchsorted(self.below, share * self.below[-1])])


def token_gaps(replicas: tuple[Replica, ...], pp: int) -> TokenGaps | None:
    """The gaps before every token but a request's first; None where no request has a second.

    A sequence that adds a token in an iteration added its last one in the iteration before, with a pipeline in the
    pp-th before, so the gap is the time between their ends. Where nobody could compute before, its last one is older
    than that iteration, and the gap begins as this one is put together: what a preempted sequence waits for is not
    among them. A sequence whose prompt another replica computed has its first token from there, so the gap before its
    second one holds its waits and the transfer of its cache.
    """
    gaps: list[float] = []
    tokens: list[int] = []
    for replica in replicas:
        ends = [0.0] * pp
        for number, iteration in enumerate(replica.iterations):
            start, end = iteration.spans[0][0], iteration.spans[-1][1]
            if iteration.ends is not None:
                gaps.extend(np.diff(np.array(iteration.ends), prepend=start).tolist())
                tokens.extend([iteration.load.decodes] * iteration.steps)
            elif iteration.load.decodes:
                since = ends[number % pp] if iteration.since_s is None else iteration.since_s
                handed_over_s = iteration.handed_over_s
                if more := iteration.load.decodes - len(handed_over_s):
                    gaps.append(end - since)
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
