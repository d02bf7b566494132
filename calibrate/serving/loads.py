"""Loads for a running engine: requests of equal lengths, a fixed number at once or on average."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from calibrate.serving.endpoint import Answer, Endpoint
from sim.inputs.scenario import Scenario
from sim.inputs.workloads import RequestPattern
from sim.prices.profile import Profile
from sim.serve.requests import Request, make_requests
from sim.serve.simulation import simulate_serving

QUANTITIES = ("time_to_first_token_s", "time_per_output_token_s", "request_latency_s")
SPREAD = 4  # requests that arrive over time, by those that run on average
FEWEST, FEWEST_AT_ONCE = 12, 4  # answers of a load in a round
MIDDLE = 0.1, 0.9  # of the vocabulary: special tokens stand at its ends


class Load(NamedTuple):
    """Requests of `prompt_len` + `output_len` tokens: `concurrency` at once or, with `paced`, one after another as a
    Poisson process, at the rate at which `concurrency` run on average if they do not slow each other further."""

    prompt_len: int
    output_len: int
    concurrency: int
    paced: bool

    @property
    def words(self) -> str:
        """The load in words, such as `8 at once`."""
        return f"{self.concurrency} {'on average' if self.paced else 'at once'}"

    def requests(self, latency_s: float) -> tuple[Request, ...]:
        """The requests; `latency_s`: of one of them when `concurrency` were sent at once. By Little's law
        `concurrency` run on average at `concurrency` / `latency_s` requests a second."""
        count = max(FEWEST, SPREAD * self.concurrency) if self.paced else self.concurrency
        rate = self.concurrency / latency_s if self.paced else None
        pattern = RequestPattern(
            prompt_len=self.prompt_len, output_len=self.output_len, count=count, rate_per_s=rate, seed=self.concurrency
        )
        return make_requests(pattern)


@dataclass(frozen=True, slots=True)
class Measured:
    """Mean seconds of a load's requests, by the result's keys; of several rounds the median."""

    load: Load
    requests: tuple[Request, ...]
    seconds: dict[str, float]

    def predicted(self, scenario: Scenario, profile: Profile) -> dict[str, float]:
        """Return the simulated means of the same keys, in seconds."""
        result = simulate_serving(scenario, profile, self.requests).result
        return {key: float(result[key]["mean"]) for key in self.seconds}


def loads(prompt_lens: Sequence[int], output_len: int, concurrencies: Sequence[int]) -> list[Load]:
    """All loads: those at once first, because they tell the rates of the others. Concurrencies rise and fall in turns,
    so that every second load has each of them, however many there are."""
    blocks = enumerate(product((False, True), prompt_lens))
    return [Load(p, output_len, c, paced) for i, (paced, p) in blocks for c in concurrencies[:: -1 if i % 2 else 1]]


def measure(
    endpoint: Endpoint, wanted: Sequence[Load], vocab: int, rounds: int, say: Callable[[str], None]
) -> tuple[list[Measured], bool]:
    """Send all loads in turn, `rounds` times, or until Ctrl-C; return those that were measured, and whether all was.

    Raises:
        InputError: as `Endpoint.check_stream`.
    """
    draw = random.Random(0)
    for length in sorted({load.prompt_len for load in wanted}):  # warms up, and finds early what is wrong
        endpoint.check_stream(_prompt(draw, length, vocab), wanted[0].output_len)
    means: dict[Load, list[dict[str, float]]] = {load: [] for load in wanted}
    requests: dict[Load, tuple[Request, ...]] = {}
    whole = True
    try:
        for number in range(1, rounds + 1):
            say(f"round {number} of {rounds}")
            for load in wanted:
                if load not in requests:
                    at_once = means[load._replace(paced=False)] if load.paced else []
                    requests[load] = load.requests(at_once[0]["request_latency_s"] if at_once else 0.0)
                times = max(1, FEWEST_AT_ONCE // len(requests[load]))
                answers = [pair for _ in range(times) for pair in send(endpoint, requests[load], vocab, draw)]
                means[load].append(_means(answers))
    except KeyboardInterrupt:  # what was measured took minutes
        whole = False
    return [Measured(load, requests[load], _medians(means[load])) for load in wanted if means[load]], whole


def send(
    endpoint: Endpoint, requests: Sequence[Request], vocab: int, draw: random.Random
) -> list[tuple[float, Answer]]:
    """Send requests of random tokens at their times; return when each was to arrive, and its answer.

    Raises:
        InputError: of the first request that fails, as `Endpoint.ask`.
    """
    prompts = [_prompt(draw, r.prompt_tokens, vocab) for r in requests]
    found: list[tuple[float, Answer]] = []
    failed: list[BaseException] = []
    begin = time.perf_counter() + 0.01 + 0.001 * len(requests)  # threads start before the first is due

    def one(request: Request, prompt: list[int]) -> None:
        due = begin + request.arrival_s
        time.sleep(max(0.0, due - time.perf_counter()))
        if failed:
            return
        try:
            found.append((due, endpoint.ask(prompt, request.output_tokens)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=pair, daemon=True) for pair in zip(requests, prompts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found


def _prompt(draw: random.Random, length: int, vocab: int) -> list[int]:
    """Random tokens, so that no engine finds a prompt in its cache."""
    first, last = (int(part * (vocab - 1)) for part in MIDDLE)
    return [draw.randint(first, last) for _ in range(length)]


def _means(answers: Sequence[tuple[float, Answer]]) -> dict[str, float]:
    """Means of `QUANTITIES`, counted from when each request was due."""
    first = [a.first_s - due for due, a in answers]
    each = [(a.last_s - a.first_s) / (a.tokens - 1) for _, a in answers]
    latency = [a.last_s - due for due, a in answers]
    return {key: statistics.fmean(x) for key, x in zip(QUANTITIES, (first, each, latency), strict=True)}


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median([means[key] for means in rounds]) for key in QUANTITIES}
