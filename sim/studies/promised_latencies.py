"""Read promised latencies (`--slo`), and tell which requests keep them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from sim.core.errors import InputError
from sim.core.units import seconds
from sim.inputs.units import parse_time_s
from sim.serve.results.records import STATISTICS, Percentiles
from sim.serve.results.result import ServingSimulation

QUANTITIES = {
    "ttft": "time_to_first_token_s",
    "tpot": "time_per_output_token_s",
    "itl": "inter_token_latency_s",
    "latency": "request_latency_s",
}
# So many seconds need their unit: without it they are milliseconds, as `vllm bench serve --goodput` takes them.
WITH_UNIT_S = {"ttft": 60.0, "tpot": 5.0, "itl": 5.0, "latency": 1000.0}
# What results and benchmarks call the quantities (`vllm bench serve --goodput`, genai-perf).
OTHER_NAMES = {key.removesuffix("_s"): name for name, key in QUANTITIES.items()} | {
    "e2e": "latency",
    "e2el": "latency",
    "e2e_latency": "latency",
}


class Promise(Struct, frozen=True):
    """Hold one promised latency: a quantity, a statistic, and the most seconds that it may be."""

    quantity: str
    statistic: str
    seconds: float

    @property
    def text(self) -> str:
        """Return the promise as the command line writes it."""
        unit = "s" if self.seconds >= WITH_UNIT_S[self.quantity] else ""
        return f"{self.quantity}_{self.statistic}={self.seconds:g}{unit}"

    @property
    def words(self) -> str:
        """Return the promise as a page and a table write it.

        >>> Promise("ttft", "p99", 0.25).words, Promise("latency", "mean", 2).words
        ('TTFT p99 ≤ 250.0 ms', 'latency mean ≤ 2.000 s')
        """
        return f"{self._name} ≤ {seconds(self.seconds)}"

    @property
    def _name(self) -> str:
        return f"{self.quantity if self.quantity == 'latency' else self.quantity.upper()} {self.statistic}"

    def missed(self, found_s: float) -> str:
        """Say what the promised latency is in its place.

        >>> Promise("ttft", "p99", 0.25).missed(0.3)
        'TTFT p99 is 300.0 ms, 1.2 times the promised 250.0 ms'
        """
        times = f"{found_s / self.seconds:.3g} times"
        return f"{self._name} is {seconds(found_s)}, {times} the promised {seconds(self.seconds)}"

    @property
    def key(self) -> str:
        """Return the result's key of the quantity."""
        return QUANTITIES[self.quantity]

    def kept(self, latencies: Mapping[str, Percentiles]) -> bool:
        """Tell whether a workload's latencies, by their keys in its result, keep the promise."""
        return self.value(latencies) <= self.seconds

    def value(self, latencies: Mapping[str, Percentiles]) -> float:
        """Return the seconds of which the promise is, of a workload's latencies by their keys in its result."""
        return float(getattr(latencies[self.key], self.statistic))


def parse_slo(text: str) -> tuple[Promise, ...]:
    """Parse promises such as `ttft_p99=0.25,tpot_p99=35ms`.

    >>> [p.text for p in parse_slo("ttft_p99=0.25, inter_token_latency_mean=30ms")]
    ['ttft_p99=0.25', 'itl_mean=0.03']

    Raises:
        InputError: for an unknown quantity or statistic, for a value that is no positive time, for one given twice.
    """
    out = list[Promise]()
    for part in text.split(","):
        name, sign, value = (x.strip() for x in part.partition("="))
        quantity, _, statistic = name.rpartition("_")
        quantity = OTHER_NAMES.get(quantity, quantity)
        if not sign or quantity not in QUANTITIES or statistic not in STATISTICS:
            allowed = f"one of {', '.join(QUANTITIES)}, then _ and one of {', '.join(STATISTICS)}, then = and seconds"
            raise InputError(f"--slo {part.strip()}: must be {allowed}, such as ttft_p99=0.25")
        try:
            most_s = parse_time_s(value)
        except ValueError as error:
            raise InputError(f"--slo {part.strip()}: found {value!r}; {error}, such as 0.25 or 250ms") from None
        if most_s >= WITH_UNIT_S[quantity] and value[-1] in "0123456789.":
            raise InputError(f"--slo {part.strip()}: {value} seconds? write {value}ms or {value}s")
        if any((p.quantity, p.statistic) == (quantity, statistic) for p in out):
            raise InputError(f"--slo {part.strip()}: {name} is given twice")
        out.append(Promise(quantity, statistic, most_s))
    return tuple(out)


def share_within(served: ServingSimulation, slo: tuple[Promise, ...]) -> float:
    """Return the share of requests that keep every promise, each by its own time to first token, time per output token
    and latency. The inter-token latency of a request is the mean, which is its time per output token."""
    times = served.times
    per_token_s = np.zeros(len(served.sequences))  # 0 for answers of one token, which have no decode iteration
    per_token_s[[s.request.output_tokens > 1 for s in served.sequences]] = times.per_output_token_s
    own = {"ttft": times.first_token_s, "latency": times.latency_s, "tpot": per_token_s, "itl": per_token_s}
    # Goodput (DistServe): a request counts only if it keeps every promise at once.
    return float(np.all([own[p.quantity] <= p.seconds for p in slo], axis=0).mean())
