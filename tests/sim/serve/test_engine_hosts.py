"""Seconds of engines' hosts: on which architecture, how certain, and from which engine."""

from __future__ import annotations

import pytest

from sim.prices.profiles import load_profile
from sim.serve.prices.costs import iteration_costs
from sim.serve.prices.load import Load
from sim.serve.simulation import simulate_serving
from sim.variants.engines import ENGINES
from tests.sim.cases import scenario_with
from tests.sim.serve.serving_cases import engine_scenario


def test_hosts_that_no_table_judged_widen_the_interval() -> None:
    """Where the host takes half of the time and is uncertain by 40 %, so is a fifth of the whole."""
    sure, unsure = (simulate_serving(engine_scenario(e, batching="continuous")).result for e in ("bundled", "vllm-0.5"))
    spread = [r["duration_interval_s"][1] / r["duration_interval_s"][0] for r in (sure, unsure)]
    assert spread[1] > 1.3 * spread[0]


@pytest.mark.parametrize("engine", [name for name, e in ENGINES.items() if e.host])
def test_host_seconds_are_never_certain(engine: str) -> None:
    assert all(times.uncertainty > 0 for times in ENGINES[engine].host.values())


def test_hosts_of_an_a100_take_longer_and_launch_as_they_were_measured_to() -> None:
    measured = ENGINES["vllm-0.2"].host
    for engine in ("vllm-0.5", "vllm-v1", "sglang-0.5", "trtllm-1.0"):
        older, newer = (ENGINES[engine].host_on(a) for a in ("ampere", "hopper"))
        assert (older.launch_s, newer.launch_s) == (measured["ampere"].launch_s, measured["hopper"].launch_s)
        assert older.iteration_s / newer.iteration_s == pytest.approx(
            measured["ampere"].sequence_s / measured["hopper"].sequence_s
        )


def test_requests_take_before_engines_without_a_measured_server_what_was_fitted_to_one() -> None:
    own = {ENGINES[name].host_on("hopper").request_s for name in ("vllm-0.5", "vllm-0.6")}
    assert own == {ENGINES["trtllm-triton"].host_on("hopper").request_s}


@pytest.mark.parametrize(
    ("engine", "one", "of_load"),
    [("vllm-0.8", 0.1e-3, 64 * 0.83e-6), ("vllm-0.11", 0.1e-3, 64 * 0.83e-6), ("vllm-0.33", 0.22e-3, 64 * 1.33e-6)],
)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_workers_of_several_gpus_are_sent_each_iteration(
    engine: str, one: float, of_load: float, tp: int, pp: int
) -> None:
    """On one GPU the engine calls its worker itself."""
    s = scenario_with(
        model="llama3-8b",
        cluster="dgx-h100",
        parallelism={"tp": tp, "pp": pp},
        inference={"engine": engine, "requests": {"prompt_len": 100, "output_len": 20, "count": 8}},
    )
    host, times = iteration_costs(s, load_profile(s.calibration)).host, ENGINES[engine].host_on("hopper")
    own_s = times.iteration_s + 64 * times.sequence_s
    messages_s = one + of_load if tp * pp > 1 else 0.0
    assert host.between_s(Load(64, 64, 64 * 500, (), 64)) == pytest.approx(own_s + messages_s, rel=1e-12)
