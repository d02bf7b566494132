"""Serving on SimPy's clock: the quick pass's times, and what couples replicas."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.serving import conversations
from sim.inputs.scenario import parse_scenario
from sim.prices.profiles import load_profile
from sim.serve.prices.costs import iteration_costs
from sim.serve.prices.host import Host
from sim.serve.prices.load import Load
from sim.serve.requests import Request
from sim.serve.simulation import simulate_serving
from tests.sim.cases import llama_like
from tests.sim.serve.serving_cases import WEIGHTS_AND_BUFFERS, every_way, finished, requests_of, serving, settings_of


@settings(max_examples=50, deadline=None)
@given(
    requests_of,
    settings_of,
    st.floats(1e5, 3e6),
    st.sampled_from([{}, {"pp": 2}, {"dp": 3}, {"pp": 4, "tp": 2}, {"pp": 3, "dp": 2}]),
)
def test_simpy_gives_the_quick_passes_times(
    requests: tuple[Request, ...], inference: dict[str, Any], cache_bytes: float, parallelism: dict[str, int]
) -> None:
    inference["router"] = "round_robin"  # the quick pass knows no other
    scenario = serving(inference, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes}, parallelism=parallelism)
    quick, simpy = (simulate_serving(scenario, requests=requests, engine=e) for e in ("static", "simpy"))
    finished(simpy)
    for a, b in zip(quick.replicas, simpy.replicas, strict=True):
        for x, y in zip(a.sequences, b.sequences, strict=True):
            assert y.first_token_s == pytest.approx(x.first_token_s, rel=1e-9)
            assert y.finish_s == pytest.approx(x.finish_s, rel=1e-9)
            assert y.preemptions == x.preemptions
        assert a.counts == b.counts
    assert [s.result["engine"]["path"] for s in (quick, simpy)] == ["static", "simpy"]
    assert simpy.result["iterations"] == quick.result["iterations"]


@pytest.mark.parametrize("rate_per_s", [8.0, 60.0])
def test_conversations_of_any_length_are_served_alike_on_simpy(rate_per_s: float) -> None:
    """On real prices, where hardly two iterations compute the same; below and above what the GPU serves."""
    served = {"requests": {"prompt_len": 1, "output_len": 1, "count": 1}, "prefix_cache": "gpu", "engine": "vllm-v1"}
    data = {"version": 1, "name": "talks", "model": "llama3-8b", "cluster": "dgx-h100", "inference": served}
    scenario, requests = parse_scenario(data, "talks"), conversations(120, rate_per_s, log_answer=4.0)
    quick, *others = every_way(scenario, requests)
    assert quick.outcome.kv_cache.prefix_hit_rate > 0.2
    assert all(other.replicas[0].counts == quick.replicas[0].counts for other in others)


def test_two_iterations_that_end_while_a_long_prompt_is_on_the_first_stage_are_both_over_when_it_is_free() -> None:
    """On three stages the third iteration may be the long one; the sequences of both others join the next."""
    sizes = ((0.0, 5339, 9), (0.0, 6088, 12), (6.42e-4, 2, 11), (1.2713e-3, 2, 9), (1.634e-3, 3924, 9))
    given = {"max_batch_tokens": 8192, "max_running_requests": 8}
    quick, *_ = every_way(serving(given, parallelism={"pp": 3}), tuple([Request(*size) for size in sizes]))
    times = quick.replicas[0].states.arrays().time_s
    assert (times[1:] >= times[:-1]).all()


@pytest.mark.parametrize(("engine", "chunked"), [("vllm-0.6", True), ("sglang-0.5", False), ("sglang-0.5", True)])
def test_the_last_iteration_of_all_others_is_followed_by_their_token_too_many(engine: str, chunked: bool) -> None:
    """Where a request comes during it, which the next iteration knows nothing of."""
    scenario, first = serving({"engine": engine, "chunked_prefill": chunked}), Request(0.0, 8, 3)
    (alone,) = simulate_serving(scenario, requests=(first,)).sequences
    for sim in every_way(scenario, (first, Request(alone.finish_s - 1e-6, 8, 3))):
        assert sim.replicas[0].counts.late_tokens == 1


def test_all_who_come_while_others_run_are_known_when_these_end() -> None:
    """In a run of alike iterations, too, with places for two."""
    scenario = serving({"engine": "sglang-0.5", "max_running_requests": 2, "prefix_cache": "none"})
    first = Request(0.0, 8, 40)
    (running,) = simulate_serving(scenario, requests=(first,)).sequences
    middle_s = (running.first_token_s + running.finish_s) / 2
    quick, *_ = every_way(scenario, (first, first, Request(1e-4, 8, 3), Request(middle_s, 8, 3)))
    assert quick.sequences[2].first_token_s == quick.sequences[3].first_token_s


def test_requests_that_pass_many_stages_take_the_quick_pass() -> None:
    def path(pp: int) -> str:
        many = {"prompt_len": 64, "output_len": 2, "count": 300}
        return simulate_serving(serving({"requests": many}, parallelism={"pp": pp})).path

    assert [path(2), path(4)] == ["simpy", "static"]


def test_of_alike_stages_the_hosts_seconds_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def seconds_each(host: Host, stage: int, *rest: Any) -> list[float]:
        asked.append(stage)
        return worked_out(host, stage, *rest)

    worked_out = Host.seconds_each
    monkeypatch.setattr(Host, "seconds_each", seconds_each)
    scenario = serving(model=llama_like(layers=8, hidden=256, heads=8, vocab=1024), parallelism={"pp": 8})
    costs = iteration_costs(scenario, load_profile(scenario.calibration))
    seconds = costs.stage_seconds(Load(64, 64, 64 * 1000, (), 64))
    assert asked == [0, 1, 7]  # the first adds embedding and the host's own work, the last one the output layer
    assert len(seconds) == 8
    assert len({*seconds[1:7]}) == 1
