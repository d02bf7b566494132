"""How long each request of a served workload took."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sim.serve.sequences import Sequence

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
        [(s.request.arrival_s, s.admitted_s, s.first_token_s, s.finish_s) for s in sequences]
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
