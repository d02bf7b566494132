"""What holds of any served workload: tokens out are tokens asked for, Little's law, caches within their size, stages
that hold one iteration at a time. Workloads of all engines are drawn at random; what an engine refuses is left out."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.serve.requests import Request
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.variants.engines import ENGINES
from tests.sim.serve.serving_cases import SMALL, finished, serving

MOE = {**SMALL, "moe": {"experts": 8, "top_k": 2, "ffn": 256}}


def drawn(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any], Any, int | None]:
    """An inference section, a layout, a model, and the most requests under way at once."""
    maybe: dict[str, list[Any]] = {
        "max_batch_tokens": [16, 64, 256, 2048],
        "max_running_requests": [1, 3, 16, 64],
        "chunked_prefill": [True, False],
        "prefix_cache": ["none", "gpu", "cpu"],
        "kv_cache": [{"max_tokens": 300}, {"max_tokens": 2000}, {"block_tokens": 1}, {"block_tokens": 64}],
        "speculative": [
            *[{"draft": SMALL, "tokens": 3, "acceptance": a} for a in (0, 0.5, 1)],
            *[{"lookup": share, "tokens": 3} for share in (0, 0.5, 1)],
        ],
        "cuda_graphs": [False],
        "async_scheduling": [True, False],
        "router": ["least_loaded", "prefix_aware", "one_queue"],
        "capacity_policy": ["max_utilization", "guaranteed_no_evict"],
        "batch_wait": [{"iterations": 5, "tokens_ratio": 0.5}],
        "balanced_prompts": [{"timeout_iterations": 5, "wait_iterations": 2}],
    }
    section: dict[str, Any] = {"engine": rng.choice(list(ENGINES))}
    section |= {key: rng.choice(values) for key, values in maybe.items() if rng.random() < 0.35}
    layout = {"tp": rng.choice([1, 1, 2]), "pp": rng.choice([1, 1, 2, 4]), "dp": rng.choice([1, 1, 2, 4])}
    if rng.random() < 0.2:
        sizes = {pool: {"replicas": rng.choice([1, 2]), "tp": rng.choice([1, 2])} for pool in ("prefill", "decode")}
        section["disaggregated"], layout = sizes, {}
        section.pop("router", None)
    elif rng.random() < 0.3:
        layout["ep"] = layout["tp"] * layout["dp"]
    most = rng.choice([None, None, 1, 3, 10])
    section["requests"] = {"prompt_len": 64, "output_len": 16, "count": 8, "max_concurrency": most}
    return section, layout, MOE if "ep" in layout or rng.random() < 0.2 else SMALL, most


def requests(rng: random.Random) -> tuple[Request, ...]:
    now, rate, out = 0.0, rng.choice([0, 10, 1000, 10000]), []
    for _ in range(rng.choice([1, 5, 20, 60])):
        now += rng.expovariate(rate) if rate else 0.0
        prompt, name = rng.randint(1, 200), rng.choice(["", "a", "b", "c"])
        out.append(Request(now, prompt, rng.randint(1, 60), name, rng.randint(0, prompt) if name else 0))
    return tuple(out)


def check(sim: ServingSimulation, most: int | None) -> None:
    assert all(s.generated == s.request.output_tokens for s in sim.sequences)
    if sim.scenario.for_serving.disaggregated is None:
        finished(sim)
    for replica in sim.replicas:
        for n in range(len(replica.iterations[0].spans) if replica.iterations else 0):
            spans = [iteration.spans[n] for iteration in replica.iterations]
            assert all(begin <= end for begin, end in spans)
            assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(spans))
    kv = sim.result["kv_cache"]
    assert kv["blocks_used"] <= sim.pools[-1].capacity.blocks
    assert 0 <= kv["waste"] <= 1
    came = [(s.arrival_s, 1) for s in sim.sequences]
    events = sorted([*came, *[(s.sent_s, -1) for s in sim.sequences]])
    under_way, seconds = 0, 0.0
    for (at_s, change), (then_s, _) in pairwise(events):
        under_way += change
        assert most is None or under_way <= most
        seconds += under_way * (then_s - at_s)
    assert seconds == pytest.approx(sum([s.sent_s - s.arrival_s for s in sim.sequences]), rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_what_holds_of_any_workload(seed: int) -> None:
    rng, served = random.Random(seed), 0
    while served < 8:
        section, layout, model, most = drawn(rng)
        own = requests(rng)
        try:
            sim = simulate_serving(serving(section, model=model, parallelism=layout or None), requests=own)
        except InputError:
            continue
        assert len(sim.sequences) == len(own)
        check(sim, most)
        served += 1


@pytest.mark.parametrize("engine", ["vllm-0.6", "vllm-0.33", "sglang-0.5.23", "trtllm-1.3"])
def test_more_load_is_slower_and_more_replicas_or_clients_give_more_tokens(engine: str) -> None:
    """The same requests, which arrive faster; all at once on more replicas of the same kind; by more clients. Beyond
    what a server carries it may be otherwise: where prompts go first, a burst has fewer iterations of prompts."""

    def result(parallelism: dict[str, int], **more: Any) -> dict[str, Any]:
        asked = {"prompt_len": 300, "output_len": 20, "count": 60, **more}
        return simulate_serving(serving({"engine": engine, "requests": asked}, parallelism=parallelism)).result

    latencies = [result({}, rate_per_s=rate)["request_latency_s"]["mean"] for rate in (1, 10, 30, 100)]
    assert latencies == sorted(latencies)
    for rates in (
        [result({"dp": dp})["output_tokens_per_s"] for dp in (1, 2, 4)],
        [result({}, max_concurrency=n)["output_tokens_per_s"] for n in (1, 2, 4, 8, 16)],
    ):
        assert rates == sorted(rates)
