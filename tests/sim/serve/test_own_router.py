"""The router of an engine where a scenario names none, and TensorRT-LLM's one queue of all ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sim.inputs.engine_file import router_of
from sim.inputs.scenario import load_scenario
from sim.rl.answers import draw_answers
from sim.rl.parts import engine_scenario
from sim.serve.replicas.router import LeastLoaded, OneQueue
from sim.serve.requests import Request
from sim.serve.scheduling.sequences import Sequence
from sim.serve.simulation import coupling, simulate_serving
from sim.variants.engines import ENGINES
from tests.sim.serve.serving_cases import SMALL, serving

EXPERTS = {**SMALL, "moe": {"experts": 8, "top_k": 2, "ffn": 64}}


@pytest.mark.parametrize(
    ("engine", "apart", "sharing"),
    [
        ("bundled", "round_robin", "round_robin"),
        ("vllm-0.6", "round_robin", "round_robin"),
        ("vllm-0.8", "least_loaded", "least_loaded"),
        ("vllm-0.33", "least_loaded", "least_loaded"),
        ("sglang-0.5.23", "round_robin", "round_robin"),
        ("trtllm", "round_robin", "round_robin"),
        ("trtllm-1.3", "round_robin", "one_queue"),
    ],
)
def test_an_engine_has_a_router_of_its_own(engine: str, apart: str, sharing: str) -> None:
    found = [
        router_of(s.for_serving, s.parallelism)
        for s in (
            serving({"engine": engine}, parallelism={"dp": 2}),
            serving({"engine": engine}, model=EXPERTS, parallelism={"dp": 2, "ep": 2}),
        )
    ]
    assert found == [apart, sharing]


def test_a_stated_router_counts_and_a_proxy_sends_in_turn() -> None:
    stated = serving({"engine": "vllm-0.33", "router": "round_robin"}, parallelism={"dp": 2})
    assert coupling(stated) == ""
    pools = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    behind = serving({"engine": "vllm-0.33", "disaggregated": pools})
    assert router_of(behind.for_serving, behind.parallelism) == "round_robin"


def test_vllm_sends_no_request_to_a_busy_replica_beside_an_idle_one() -> None:
    """In turn, the third request would wait behind the first, whose answer is long."""
    requests = (Request(0.0, 16, 2000), Request(0.01, 16, 4), Request(0.5, 16, 4))
    layout, limits = {"dp": 2}, {"max_running_requests": 1}
    own = simulate_serving(serving({"engine": "vllm-0.33", **limits}, parallelism=layout), requests=requests)
    turns = simulate_serving(
        serving({"engine": "vllm-0.33", "router": "round_robin", **limits}, parallelism=layout), requests=requests
    )
    own_s, in_turn_s = (max(s.finish_s for s in found.sequences) for found in (own, turns))
    assert own_s < in_turn_s


def chosen(engine: str, states: list[tuple[int, int, float]], times: int = 1) -> list[int]:
    """Where an engine's server sends requests, one after another, whose replicas have so many requests that wait and
    run, and so much of their cache taken; none of them ends, and none of those sent counts."""
    ranks: Any = [
        SimpleNamespace(waiting=[0] * w, running=[0] * r, cache=SimpleNamespace(available=1000 * (1 - u), blocks=1000))
        for w, r, u in states
    ]
    router = LeastLoaded(ranks, ENGINES[engine].routers.score)
    return [router.choose(Sequence(Request(0.0, 16, 4), 0)) for _ in range(times)]


@pytest.mark.parametrize(
    ("engine", "states", "expected"),
    [
        ("vllm-v1", [(1, 10, 0.9), (0, 12, 0.1)], 0),  # 11, 12
        ("vllm-0.11", [(1, 10, 0.9), (0, 12, 0.1)], 1),  # 14, 12
        ("vllm-0.21", [(1, 10, 0.9), (0, 15, 0.1)], 0),  # 14, 15
        ("vllm-0.28", [(1, 10, 0.5), (0, 12, 0.1)], 0),  # 11, 12
        ("vllm-0.33", [(1, 10, 1.0), (0, 13, 0.1)], 1),  # 11 + 3, 13
    ],
)
def test_vllm_counts_a_waiting_request_by_release(
    engine: str, states: list[tuple[int, int, float]], expected: int
) -> None:
    assert chosen(engine, states) == [expected]


def test_vllm_sends_to_equal_replicas_in_turn_since_0_26() -> None:
    equal = [(0, 3, 0.2)] * 3
    assert chosen("vllm-0.21", equal, 4) == [0, 0, 0, 0]
    assert chosen("vllm-0.28", equal, 4) == [0, 1, 2, 0]


def queue(loads: tuple[tuple[int, ...], ...], places: int) -> OneQueue:
    """The router of ranks whose requests have prompts of so many tokens."""
    ranks: Any = [
        SimpleNamespace(
            waiting=[],
            running=[SimpleNamespace(request=Request(0.0, tokens, 8)) for tokens in load],
            limits=SimpleNamespace(running=places),
        )
        for load in loads
    ]
    router = OneQueue(ranks)
    router._tokens = [sum(load) for load in loads]
    return router


@pytest.mark.parametrize(
    ("loads", "found"),
    [
        (((100,), (50,)), 1),  # fewest tokens
        (((100,), (20, 20)), 0),  # the second has as many requests as the fullest one has
        (((100, 100), (300,), (10, 10)), 1),
        (((100, 100), (10, 10)), 1),  # all have as many: one more each may be
        (((50,), (50,)), 0),
    ],
)
def test_a_request_of_the_queue_goes_to_the_rank_with_fewest_tokens(
    loads: tuple[tuple[int, ...], ...], found: int
) -> None:
    assert queue(loads, 4).choose(Sequence(Request(0.0, 16, 8), 0)) == found


def test_a_prompt_counts_until_its_request_has_left() -> None:
    router, one = queue(((), ()), 4), Sequence(Request(0.0, 16, 8), 0)
    chosen = router.choose(one)
    assert (chosen, router._tokens) == (0, [16, 0])
    router.left(one)
    assert router._tokens == [0, 0]


def test_a_request_waits_in_the_queue_while_all_ranks_are_full() -> None:
    assert queue(((1, 1), (1,)), 2).has_place()
    assert not queue(((1, 1), (1, 1)), 2).has_place()


def test_ranks_take_requests_out_of_one_queue() -> None:
    """Two ranks run one request each. In turn, four of eight requests wait behind the long one; out of one queue none
    does, and all tokens come out."""
    requests = (Request(0.0, 16, 300), *(Request(0.0, 16, 8) for _ in range(7)))
    found = {
        router: simulate_serving(
            serving(
                {"engine": "trtllm-1.3", "max_running_requests": 1, "router": router},
                model=EXPERTS,
                parallelism={"dp": 2, "ep": 2},
            ),
            requests=requests,
        )
        for router in (None, "round_robin", "least_loaded")
    }
    ends = {router: sorted(s.finish_s for s in sim.sequences) for router, sim in found.items()}
    assert all(len(e) == 8 and min(e) > 0 for e in ends.values())
    assert ends[None][-2] < 0.7 * ends["round_robin"][-2]
    assert ends[None][-2] < 0.7 * ends["least_loaded"][-2]


def test_a_trainer_divides_its_prompts_among_replicas_itself() -> None:
    scenario = load_scenario(Path(__file__).parents[3] / "scenarios" / "rl_grpo_llama8b.yaml")
    rl = scenario.rl
    assert rl is not None
    served = engine_scenario(scenario, rl, draw_answers(rl, scenario.for_training.seq_len))
    assert coupling(served) == ""


def test_requests_in_the_queue_start_replicas_and_go_to_them_at_once() -> None:
    """Nobody leaves the first replica before its answer of 5,000 tokens ends."""
    rule = {"min_replicas": 1, "metric": "ongoing", "target": 1, "interval_s": 0.01, "startup_s": 0.01}
    rule |= {"upscale_delay_s": 0, "downscale_delay_s": 60}
    section = {"router": "one_queue", "max_running_requests": 1, "autoscaling": rule}
    requests = (Request(0.0, 16, 5000), Request(0.005, 16, 5))
    s = serving({"engine": "trtllm-1.3", **section}, parallelism={"dp": 2})
    first, second = simulate_serving(s, requests=requests).sequences
    assert second.finish_s < first.finish_s / 2
