"""How many requests a second the quick pass serves, of conversations as in Mooncake's traces."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from benchmarks.measure import shortest_s
from sim.inputs.scenario import parse_scenario
from sim.prices.profiles import load_profile
from sim.serve.hashed_prefixes import HASHED_TOKENS
from sim.serve.requests import Request
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
    return [
        {"what": f"requests {name}", "tasks": count, "seconds": x, "per_s": count / x, "unit": "requests"}
        for name, x in best.items()
    ]
