"""How long each request of a served workload took, and each token."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sim.serve.replicas.replica import Replica
from sim.serve.results.records import Percentiles
from sim.serve.scheduling.sequences import Sequence
from sim.variants.engines.host_times import HostTimes

Seconds = NDArray[np.float64]


class RequestTimes(Struct, frozen=True, eq=False):
    """Seconds of each request, [requests]; `per_output_token_s` is [requests with more than one output token]."""

    latency_s: Seconds  # arrival to last token
    queue_s: Seconds  # arrival to first admission
    first_token_s: Seconds  # arrival to first token
    per_output_token_s: Seconds  # mean of the gaps between a request's own tokens


def request_times(sequences: Items[Sequence], host: HostTimes) -> RequestTimes:
    """Times of `sequences`, in their order, of a server whose `host` takes time before and behind the engine."""
    arrival, admitted, first, finish = np.array(
        [(s.arrival_s, s.admitted_s, s.first_token_s + s.first_after_s, s.sent_s) for s in sequences]
    ).T
    tokens = np.array([s.request.prompt_tokens for s in sequences])
    before_s = host.before_s(tokens)
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


def token_gaps(replicas: tuple[Replica, ...]) -> TokenGaps | None:
    """The gaps before every output but a request's first; None where no request has a second.

    What a request waits for between two outputs is in the gap: iterations of others' prompts, preemption and computing
    again, the transfer to a replica that goes on.
    """
    found = [r.scheduler.gaps for r in replicas]
    ends, run_outputs = [e for g in found for e, _ in g.runs], [n for g in found for _, n in g.runs]
    lengths = np.array([len(e) for e in ends], dtype=int)
    within = np.ones(lengths.sum(), dtype=bool)
    within[np.cumsum(lengths) - lengths] = False  # the first end of a run ends no gap of it
    runs = np.diff(np.concatenate([[], *ends]), prepend=0.0)[within]
    lost = [s for g in found for s in g.lost]
    seconds = np.concatenate([runs, *[g.seconds for g in found], lost])
    weights = np.concatenate([np.repeat(run_outputs, lengths - 1), *[g.outputs for g in found], -np.ones(len(lost))])
    if not len(seconds):
        return None
    order = np.argsort(seconds, kind="stable")
    seconds = seconds[order]
    distinct = np.flatnonzero(np.diff(seconds, prepend=-1.0))
    tokens = np.add.reduceat(weights[order], distinct)
    return TokenGaps(seconds[distinct], tokens, np.cumsum(tokens))
