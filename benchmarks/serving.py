"""How many requests a second the quick pass serves, of conversations as in Mooncake's traces."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from benchmarks.measure import shortest_s
from sim.inputs.overrides import merge
from sim.inputs.scenario import Scenario, parse_scenario
from sim.inputs.serving_keys import HASHED_TOKENS
from sim.prices.profile import Profile
from sim.prices.profiles import load_profile
from sim.serve.requests import Request
from sim.serve.results.records import ServingResult
from sim.serve.simulation import simulate_serving

SERVED: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": "dgx-h100",
    "inference": {
        "engine": "vllm-v1",
        "prefix_cache": "gpu",
        "requests": {"prompt_len": 1, "output_len": 1, "count": 1},  # replaced by conversations
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "without shared prefixes": {"inference": {"prefix_cache": "none"}},
    "in chunks of 512 tokens": {"inference": {"max_batch_tokens": 512}},
    "with prompts first (vllm-0.6)": {"inference": {"engine": "vllm-0.6", "chunked_prefill": False}},
    "on two pipeline stages": {"parallelism": {"pp": 2}},
    "on four replicas, to the least loaded": {"parallelism": {"dp": 4}, "inference": {"router": "least_loaded"}},
    "on a pool for prompts and one for tokens": {"inference": {"disaggregated": {"prefill": {}, "decode": {}}}},
    "on four replicas that share experts": {"model": "mixtral-8x7b", "parallelism": {"dp": 4, "ep": 4}},
    "with a draft": {"inference": {"speculative": {"draft": "llama3.2-1b", "tokens": 3}}},
}


def conversations(count: int, rate_per_s: float, log_answer: float = 4.75) -> tuple[Request, ...]:
    """Turns of conversations, each with all before it, known by hashes; lengths of heavy spread, Poisson arrivals.

    `log_answer`: mean of the logarithm of an answer's tokens.
    """
    draw, at_s, talks, found = random.Random(5), 0.0, [[0, 0]], []
    for _ in range(count):
        at_s += draw.expovariate(rate_per_s)
        if draw.random() < 0.3:
            talks.append([len(talks), 0])
        talk = draw.choice(talks[-20:])
        talk[1] += 1 + int(draw.lognormvariate(5.5, 1.2))
        hashes = tuple([f"{talk[0]}/{i}" for i in range(talk[1] // HASHED_TOKENS)])
        output = 1 + int(draw.lognormvariate(log_answer, 1.0))
        found.append(Request(at_s, talk[1], output, "", len(hashes) * HASHED_TOKENS, hashes))
        talk[1] += output
    return tuple(found)


def serving(repeats: int, count: int) -> list[dict[str, Any]]:
    """`count` requests at 10 a second on one H100, and with the result's numbers."""
    s = parse_scenario(SERVED, "benchmark")
    profile, requests = load_profile(s.calibration), conversations(count, 10.0)
    serve = partial(simulate_serving, s, profile, requests, engine="static")
    best = shortest_s({"served": serve, "served, and the result": lambda: serve().result}, repeats)
    return [_row(name, count, x) for name, x in best.items()]


def serving_ways(repeats: int, count: int) -> list[dict[str, Any]]:
    """`count` requests served in each of `WAYS`, 10 a second for each replica, and the result's numbers."""
    runs = {}
    for name, changes in WAYS.items():
        s = parse_scenario(merge(SERVED, changes), "benchmark")
        requests = conversations(count, 10.0 * s.parallelism.dp)
        runs[name] = partial(_served, s, load_profile(s.calibration), requests)
    return [_row(name, count, x) for name, x in shortest_s(runs, repeats).items()]


def _served(s: Scenario, profile: Profile, requests: tuple[Request, ...]) -> ServingResult:
    return simulate_serving(s, profile, requests).outcome


def _row(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        "what": f"requests {name}",
        "tasks": count,
        "seconds": seconds,
        "per_s": count / seconds,
        "unit": "requests",
    }
