"""SGLang's share of running requests' remaining output, for which a request that enters must find room."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.serve.requests import Request
from sim.serve.scheduling.reserved_output import ReservedOutput
from sim.serve.scheduling.sequences import Sequence
from sim.serve.simulation import simulate_serving
from tests.sim.serve.serving_cases import WEIGHTS_AND_BUFFERS, every_way, requests_of, serving


def test_the_share_falls_by_steps_and_rises_with_what_was_written() -> None:
    output = ReservedOutput(0.7, 0.098, 0.7)
    output.steps = 300
    assert output.share == pytest.approx((0.7 + 0.098) / 2)
    output.steps = 10_000
    assert output.share == 0.098
    output.retracted([Sequence(Request(0.0, 10, 100), i, generated=51) for i in range(3)], 150)
    output.steps += 1
    assert output.share == pytest.approx(0.7)  # 50 and 20 more of 100
    output.steps = 10_000
    output.restart()
    assert output.share == 0.7


def test_a_constant_share_stays() -> None:
    output = ReservedOutput(1.0, 1.0, 1.0)
    output.steps = 10_000
    assert output.share == 1.0


@pytest.mark.parametrize(("times", "first"), [(0.3, 0.21), (1, 0.7), (2, 1.0)])
def test_times_its_share_are_at_most_all_output(times: float, first: float) -> None:
    """managers/scheduler.py: init_new_token_ratio, and min_new_token_ratio, which is a fixed part of it."""
    output = ReservedOutput(0.7, 0.098, 0.7).of(times)
    assert (output.first, output.begin, output.least) == pytest.approx((first, first, 0.14 * first))


def test_a_careful_server_puts_fewer_out() -> None:
    """Requests come one after another; the share falls, so that some are put out all the same."""
    requests = tuple([Request(0.001 * n, 64, 448) for n in range(80)])
    wanted = {"engine": "sglang-0.5", "prefix_cache": "none", "kv_cache": {"max_tokens": 10_000}}
    out = {}
    for times in (0.0, 1.0, None, 9.0):
        sim = every_way(serving({**wanted, "schedule_conservativeness": times}), requests)[0]
        out[times] = sim.replicas[0].counts.preemptions
    assert out[0.0] > out[None] == out[1.0] > out[9.0]


def test_engines_without_such_a_share_refuse_it() -> None:
    with pytest.raises(InputError, match=r"schedule_conservativeness: found 2; engine vllm-0.14 keeps no share"):
        serving({"engine": "vllm-0.14", "schedule_conservativeness": 2})


def bursts(at_s: tuple[float, ...]) -> tuple[int, list[int]]:
    """The tokens of a small cache, and of each burst of 60 requests how many run at once."""
    requests = tuple([Request(t, 64, 448) for t in at_s for _ in range(60)])
    wanted = {"engine": "sglang-0.5", "prefix_cache": "none", "max_batch_tokens": 60 * 64}
    s = serving({**wanted, "kv_cache": {"memory_fraction": 0.9}}, gpu={"memory_bytes": 5e7})
    sim = simulate_serving(s, requests=requests)
    admitted = [x.admitted_s for x in sim.sequences]
    return sim.capacity.blocks * s.for_serving.kv_cache.block_tokens, [admitted.count(t) for t in at_s]


def test_of_a_burst_as_many_enter_at_once_as_have_room_for_all_their_output() -> None:
    room, (first,) = bursts((0.0,))
    assert first == pytest.approx(room / (64 + 448), abs=1)
    assert room / (64 + 0.7 * 448) > first + 1


def test_an_idle_server_lets_a_second_burst_in_as_the_first() -> None:
    _, (first, second) = bursts((0.0, 1000.0))
    assert first == second < 60


@settings(max_examples=25, deadline=None)
@given(requests_of, st.floats(1e5, 2e6), st.sampled_from(["none", "gpu"]), st.sampled_from([1, 2]))
def test_a_falling_share_is_alike_in_every_way(
    requests: tuple[Request, ...], cache_bytes: float, prefix_cache: str, pp: int
) -> None:
    """Grouped, one by one, on SimPy."""
    inference = {"engine": "sglang-0.5", "prefix_cache": prefix_cache, "max_batch_tokens": 128}
    every_way(
        serving(inference, gpu={"memory_bytes": WEIGHTS_AND_BUFFERS + cache_bytes}, parallelism={"pp": pp}), requests
    )
