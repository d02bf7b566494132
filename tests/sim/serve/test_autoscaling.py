"""Replicas that are started and stopped by a rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.inputs.scenario import load_scenario
from sim.serve.requests import Request
from sim.serve.results.over_time import over_time
from sim.serve.results.result import ServingSimulation
from sim.serve.simulation import simulate_serving
from sim.views.serving_summary import cache_lines
from tests.sim.serve.serving_cases import finished, requests_of, serving, times

SCENARIO = Path(__file__).parents[3] / "scenarios" / "serve_autoscaling.yaml"
rules = st.fixed_dictionaries(
    {
        "metric": st.sampled_from(["ongoing", "waiting"]),
        "target": st.floats(0.1, 8),
        "interval_s": st.floats(1e-3, 2e-2),
        "upscale_delay_s": st.floats(0, 0.02),
        "downscale_delay_s": st.floats(0, 0.02),
        "startup_s": st.floats(0, 0.02),
    }
)


def scaled(
    requests: tuple[Request, ...], rule: dict[str, Any] | None, dp: int = 3, router: str = "least_loaded"
) -> ServingSimulation:
    inference = {"autoscaling": rule, "router": router, "max_running_requests": 2}
    sim = simulate_serving(serving(inference, parallelism={"dp": dp}), requests=requests, engine="auto")
    finished(sim)
    return sim


@settings(max_examples=30, deadline=None)
@given(requests_of, st.sampled_from(["round_robin", "least_loaded", "prefix_aware"]), st.integers(1, 4))
def test_all_replicas_always_on_are_as_without_a_rule(requests: tuple[Request, ...], router: str, dp: int) -> None:
    rule = {"min_replicas": dp, "interval_s": 0.01}
    with_rule, without = (scaled(requests, r, dp, router) for r in (rule, None))
    assert times(with_rule) == times(without)
    use = with_rule.outcome.autoscaling
    assert use is not None
    assert (use.starts, use.stops, use.replicas_max) == (0, 0, dp)
    assert use.gpu_hours == pytest.approx(use.gpu_hours_always_on, rel=1e-12)
    assert with_rule.outcome.output_tokens_per_s_per_gpu == pytest.approx(without.outcome.output_tokens_per_s_per_gpu)


@settings(max_examples=40, deadline=None)
@given(
    requests_of,
    rules,
    st.sampled_from(["round_robin", "least_loaded", "prefix_aware"]),
)
def test_any_rule_serves_all(requests: tuple[Request, ...], rule: dict[str, Any], router: str) -> None:
    """Who computes is on, no more and no fewer are on than allowed, and hours are the integral of how many are on."""
    sim = scaled(requests, rule, 3, router)
    use = sim.outcome.autoscaling
    assert use is not None
    assert all(1 <= n <= 3 for _, n in use.replicas)
    edges = [t for t, _ in use.replicas] + [sim.end_s]
    area = sum(n * (edges[i + 1] - edges[i]) for i, (_, n) in enumerate(use.replicas))
    assert use.gpu_hours * 3600 == pytest.approx(area, rel=1e-9, abs=1e-12)
    for replica in sim.replicas:
        own = [(s.start_s, s.stop_s) for s in sim.spans if s.replica == replica.index]
        for iteration in replica.iterations:
            begin, end = iteration.spans[0][0], iteration.spans[-1][1]
            assert any(on <= begin and end <= off for on, off in own)


def test_the_rules_times() -> None:
    """Eight long requests at once and a trickle after them: the second replica is wanted at once, starts after the
    delay, takes its first request when it has started, and stops a delay after it is no longer wanted."""
    long = [Request(0.0, 64, 300) for _ in range(8)]
    trickle = [Request(0.00037 + 0.0005 * i, 64, 2) for i in range(400)]
    rule = {
        "target": 5,
        "interval_s": 0.001,
        "upscale_delay_s": 0.002,
        "startup_s": 0.0015,
        "downscale_delay_s": 0.003,
    }
    sim = scaled(tuple(long + trickle), rule, 2)
    looks = [0.001 * i for i in range(1, 200)]
    counts = [sum(s.request.arrival_s <= t < s.finish_s for s in sim.sequences) for t in looks]
    enough = next(i for i, n in enumerate(counts) if n <= 5)
    assert all(n <= 5 for n in counts[enough:])
    assert enough > 10
    (second,) = [s for s in sim.spans if s.replica == 1]
    assert second.start_s == pytest.approx(0.002)
    taken = [s.request.arrival_s for s in sim.replicas[1].sequences]
    assert min(taken) == min(s.request.arrival_s for s in sim.sequences if s.request.arrival_s > 0.002 + 0.0015)
    drained = looks[enough] + 0.003
    last = max([s.finish_s for s in sim.replicas[1].sequences])
    assert second.stop_s == pytest.approx(max(drained, last), rel=1e-9)
    assert max(taken) < drained


def pools(
    requests: tuple[Request, ...], rule: dict[str, Any] | None, sizes: tuple[int, int], router: str = "least_loaded"
) -> ServingSimulation:
    given = {"prefill": {"replicas": sizes[0]}, "decode": {"replicas": sizes[1], "tp": 2}}
    inference = {"autoscaling": rule, "router": router, "max_running_requests": 2, "disaggregated": given}
    sim = simulate_serving(serving(inference), requests=requests)
    assert all(s.generated == s.request.output_tokens for s in sim.sequences)
    return sim


@settings(max_examples=20, deadline=None)
@given(requests_of, st.sampled_from(["round_robin", "least_loaded"]), st.integers(1, 3))
def test_pools_whose_replicas_are_all_on_are_as_without_a_rule(
    requests: tuple[Request, ...], router: str, size: int
) -> None:
    rule = {"min_replicas": size, "interval_s": 0.01}
    with_rule, without = (pools(requests, r, (size, size), router) for r in (rule, None))
    assert times(with_rule) == times(without)
    use = with_rule.outcome.autoscaling
    assert use is not None
    assert use.gpu_hours == pytest.approx(use.gpu_hours_always_on, rel=1e-12)
    assert with_rule.outcome.output_tokens_per_s_per_gpu == pytest.approx(without.outcome.output_tokens_per_s_per_gpu)


@settings(max_examples=40, deadline=None)
@given(
    requests_of,
    rules,
    st.sampled_from(["round_robin", "least_loaded"]),
)
def test_any_rule_serves_all_in_pools(requests: tuple[Request, ...], rule: dict[str, Any], router: str) -> None:
    """Each pool by itself: who computes, sends or receives is on, and hours are the integrals of how many are on."""
    sim = pools(requests, rule, (2, 3), router)
    use, (prefill, decode) = sim.outcome.autoscaling, sim.outcome.pools or ()
    assert use is not None
    for number, (pool, one, most, gpus) in enumerate(
        zip(sim.pools, (prefill.autoscaling, decode.autoscaling), (2, 3), (1, 2), strict=True)
    ):
        assert one is not None
        assert all(1 <= n <= most for _, n in one.replicas)
        edges = [t for t, _ in one.replicas] + [sim.end_s]
        area = sum(n * (edges[i + 1] - edges[i]) for i, (_, n) in enumerate(one.replicas))
        assert one.gpu_hours * 3600 == pytest.approx(gpus * area, rel=1e-9, abs=1e-12)
        for replica in pool.replicas:
            own = [(s.start_s, s.stop_s) for s in sim.spans if (s.pool, s.replica) == (number, replica.index)]
            busy = [(i.spans[0][0], i.spans[-1][1]) for i in replica.iterations]
            busy += [(t.start_s, t.end_s) for t in sim.transfers if (t.prefill, t.decode)[number] == replica.index]
            assert all(any(on <= begin and end <= off for on, off in own) for begin, end in busy)
    assert use.gpu_hours == pytest.approx(prefill.autoscaling.gpu_hours + decode.autoscaling.gpu_hours)  # type: ignore[union-attr]
    assert use.starts == prefill.autoscaling.starts + decode.autoscaling.starts  # type: ignore[union-attr]


def test_long_answers_start_decode_replicas_alone() -> None:
    """Short prompts and long answers: requests pile up where tokens are added, and only there replicas are started."""
    requests = tuple([Request(0.001 * i, 16, 400) for i in range(60)])
    rule = {"target": 4, "interval_s": 0.001, "upscale_delay_s": 0.002, "startup_s": 0.001, "downscale_delay_s": 1.0}
    sim = pools(requests, rule, (3, 3))
    prefill, decode = (pool.autoscaling for pool in sim.outcome.pools or ())
    assert prefill is not None
    assert decode is not None
    assert (prefill.starts, prefill.replicas_max) == (0, 1)
    assert decode.replicas_max == 3
    shown = dict(cache_lines(sim.outcome))
    assert shown["prefill on"].startswith("1 replicas in the mean, 1 at most; 0 starts")
    assert [level.name for level in over_time(sim).replicas] == ["prefill", "decode"]


def test_a_drained_replica_stays_on_until_its_prompts_have_been_copied() -> None:
    """A burst of prompts, and one decode replica that has room for two at a time: prefill replicas are no longer
    wanted long before the last of their blocks are free."""
    requests = tuple([Request(1e-5 * (i > 5), 200, 300) for i in range(12)])
    rule = {"target": 2, "interval_s": 0.001, "upscale_delay_s": 0, "startup_s": 0, "downscale_delay_s": 0}
    sim = pools(requests, rule, (2, 1))
    (drained,) = [s for s in sim.spans if s.pool == 0 and s.stop_s < sim.end_s]
    prefilled = max(i.spans[-1][1] for i in sim.pools[0].replicas[drained.replica].iterations)
    copied = max(t.end_s for t in sim.transfers if t.prefill == drained.replica)
    assert copied > 2 * prefilled
    assert drained.stop_s == pytest.approx(copied, rel=1e-9)


def test_the_shipped_scenario_saves_hours_and_costs_latency() -> None:
    rule, always = (simulate_serving(load_scenario(SCENARIO, o)).outcome for o in ((), ("inference.autoscaling=null",)))
    use = rule.autoscaling
    assert use is not None
    assert always.autoscaling is None
    assert use.starts >= 2
    assert use.stops >= 1
    assert use.gpu_hours < 0.8 * use.gpu_hours_always_on
    assert rule.time_to_first_token_s.p99 > always.time_to_first_token_s.p99


@pytest.mark.parametrize(
    ("inference", "parallelism", "message"),
    [
        ({"autoscaling": {"min_replicas": 3}}, {"dp": 2}, r"min_replicas: found 3; parallelism.dp \(2\)"),
        (
            {"autoscaling": {"min_replicas": 2}, "disaggregated": {"prefill": {"replicas": 3}}},
            {},
            r"min_replicas: found 2; disaggregated.decode.replicas \(1\) is the most replicas",
        ),
        ({"autoscaling": {}, "batching": "static"}, {"dp": 2}, "all requests of a static batch start and end together"),
        ({"autoscaling": {"interval_s": 1e-6}}, {"dp": 2}, "interval_s: found 1e-06; must be at least 0.001"),
    ],
)
def test_what_cannot_be_scaled_is_refused(inference: dict[str, Any], parallelism: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        serving(inference, parallelism=parallelism)


def test_the_quick_pass_says_that_it_does_not_know_it() -> None:
    with pytest.raises(InputError, match=r"static does not know inference.autoscaling"):
        simulate_serving(serving({"autoscaling": {}}, parallelism={"dp": 2}), engine="static")


def test_the_pages_level_is_the_results() -> None:
    sim = scaled(tuple([Request(0.0001 * i, 64, 100) for i in range(40)]), {"interval_s": 0.001, "upscale_delay_s": 0})
    use, (level,) = sim.outcome.autoscaling, over_time(sim).replicas
    assert use is not None
    assert level.mean.mean() == pytest.approx(use.replicas_mean, rel=1e-9)
    assert level.most.max() == use.replicas_max == 3
