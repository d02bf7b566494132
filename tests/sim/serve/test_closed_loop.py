"""Clients in a closed loop: at most `max_concurrency` requests under way."""

from __future__ import annotations

import itertools

import pytest

from sim.core.engines import Engine
from sim.inputs.scenario import load_scenario
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving

SMALL = ("inference.requests.count=120", "inference.requests.output_len=40")
AT_ONCE = (*SMALL, "inference.requests.rate_per_s=null")


def served(*changes: str, engine: Engine = "static", group: bool = True) -> ServingSimulation:
    return simulate_serving(load_scenario("scenarios/serve_llama8b.yaml", list(changes)), engine=engine, group=group)


def under_way(sim: ServingSimulation) -> int:
    """The most requests between their arrival and their last token; who ends makes room for who comes then."""
    events = sorted([(s.finish_s, -1) for s in sim.sequences] + [(s.arrival_s, 1) for s in sim.sequences])
    return max(itertools.accumulate([by for _, by in events]))


def test_one_client_waits_for_each_answer() -> None:
    sim, lone = served(*AT_ONCE, "inference.requests.max_concurrency=1"), served("inference.requests.count=1", SMALL[1])
    each = lone.end_s - lone.start_s
    assert [s.finish_s - s.arrival_s for s in sim.sequences] == pytest.approx([each] * 120)
    assert [s.arrival_s for s in sim.sequences[1:]] == [s.finish_s for s in sim.sequences[:-1]]
    assert sim.end_s == pytest.approx(120 * each)


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_littles_law(ratio: float) -> None:
    sim = served(*AT_ONCE, "inference.requests.max_concurrency=8", f"inference.requests.range_ratio={ratio}")
    last_sent_s = max(s.arrival_s for s in sim.sequences)
    busy = sum(min(s.finish_s, last_sent_s) - s.arrival_s for s in sim.sequences)
    assert busy == pytest.approx(8 * last_sent_s)
    assert under_way(sim) == 8


LOOPS = [
    (*AT_ONCE, "inference.requests.max_concurrency=8"),
    (*SMALL, "inference.requests.max_concurrency=8", "inference.requests.range_ratio=0.5"),
    (*SMALL, "inference.requests.max_concurrency=16", "inference.requests.rate_per_s=200", "parallelism.pp=2"),
    (
        *AT_ONCE,
        "inference.requests.max_concurrency=12",
        "inference.requests.range_ratio=0.3",
        "inference.engine=sglang-0.5",
    ),
    (
        *AT_ONCE,
        "inference.requests.max_concurrency=12",
        "inference.max_running_requests=5",
        "inference.engine=vllm-0.14",
    ),
]


@pytest.mark.parametrize("changes", LOOPS, ids=lambda c: c[2] + c[-1])
def test_both_engines_give_the_same_times(changes: tuple[str, ...]) -> None:
    runs = [served(*changes), served(*changes, engine="simpy"), served(*changes, group=False)]
    times = [[(s.arrival_s, s.first_token_s, s.finish_s) for s in sim.sequences] for sim in runs]
    assert times[0] == times[1] == times[2]
    assert under_way(runs[0]) <= 16


def test_a_limit_that_nobody_reaches_changes_nothing() -> None:
    plain, limited = served(*SMALL), served(*SMALL, "inference.requests.max_concurrency=120")
    assert plain.outcome.request_latency_s == limited.outcome.request_latency_s


@pytest.mark.parametrize(
    "changes",
    [
        ("parallelism.dp=3",),
        ("inference.disaggregated={prefill: {replicas: 1}, decode: {replicas: 2}}",),
    ],
)
def test_replicas_share_one_limit(changes: tuple[str, ...]) -> None:
    sim = served(*AT_ONCE, "inference.requests.max_concurrency=10", *changes, engine="auto")
    assert under_way(sim) == 10
    assert sim.path == "simpy"


def test_lengths_within_the_range() -> None:
    sim = served(*SMALL, "inference.requests.count=3000", "inference.requests.range_ratio=0.25")
    prompts, outputs = zip(*[(r.prompt_tokens, r.output_tokens) for r in sim.requests], strict=True)
    assert (min(prompts), max(prompts)) == (750, 1250)
    assert set(outputs) == set(range(30, 51))
    assert sum(prompts) / 3000 == pytest.approx(1000, rel=0.02)


@pytest.mark.parametrize("engine", ["static", "simpy"])
def test_a_client_s_next_request_passes_the_http_server_too(engine: Engine) -> None:
    """One client: its latencies, which begin before the server, follow one another."""
    sim = served(*AT_ONCE, "inference.requests.max_concurrency=1", "inference.engine=vllm-0.11", engine=engine)
    before_s = sim.costs.host.times.before_s(1000)
    assert before_s > 0
    gaps = [b.arrival_s - a.sent_s for a, b in itertools.pairwise(sim.sequences)]
    assert gaps == pytest.approx([before_s] * 119)
    assert sim.times.latency_s.sum() == pytest.approx(sim.end_s + before_s + sim.sequences[-1].last_after_s)
