"""`--engine simpy` runs every workload, with the times of the passes without a clock, and results say which ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.core.engines import Engine
from sim.core.errors import InputError
from sim.inputs.scenario import Scenario, load_scenario
from sim.serve.simulation import simulate_serving
from sim.simulation import simulate
from sim.studies.goodput import goodput
from sim.traces.replay import replay
from tests.sim.commands.test_run import run
from tests.sim.traces.test_whatif import two_by_two

SCENARIOS = Path(__file__).parents[3] / "scenarios"
FEW = ["inference.requests.count=12"]
WORKLOADS: dict[str, list[str]] = {
    "1f1b_pp8": [],
    "captured_stablelm": [],
    "distill_logits_apart": [],
    "distill_sequence": [],
    "sft_lora_llama8b": [],
    "straggler_dp": [],
    "shared_network": [],
    "collectives_messages": [],
    "network_mixed": [],
    "network_slow_nic": [],
    "serve_batch1": [],
    "serve_deepseek_v3": FEW,
    "serve_static_a100": FEW,
    "serve_swap": [],
    "serve_tiers": [],
    "serve_lora": [],
    "serve_weight_offload": [],
    "serve_context_parallel": [],
    "serve_prefix_cpu": [],
    "serve_speculative_llama70b": FEW,
}
SIMPY_ALONE = {
    "serve_disaggregated_llama70b": FEW,
    "serve_autoscaling": [],
    "serve_router_prefix": [],
    "serve_afd": FEW,
}


def ran(scenario: Scenario, engine: Engine) -> tuple[str, list[float]]:
    """Which engine ran, and the times that came out."""
    if scenario.inference is None:
        step = simulate(scenario, engine=engine)
        return step.result["engine"]["path"], [step.step_time_s, *(row["busy_s"] for row in step.result["ranks"])]
    served = simulate_serving(scenario, engine=engine)
    times = [s.finish_s for pool in served.pools for replica in pool.replicas for s in replica.sequences]
    return served.result["engine"]["path"], times


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_simpy_gives_what_the_passes_give(name: str) -> None:
    scenario = load_scenario(SCENARIOS / f"{name}.yaml", WORKLOADS[name])
    (clock, on_simpy), (none, passes) = ran(scenario, "simpy"), ran(scenario, "static")
    assert (clock, none) == ("simpy", "static")
    assert on_simpy == pytest.approx(passes, rel=1e-9)
    assert scenario.inference is not None or on_simpy == passes  # a step's to the last bit


@pytest.mark.parametrize("name", SIMPY_ALONE)
def test_what_simpy_alone_can_do_is_refused_elsewhere(name: str) -> None:
    scenario = load_scenario(SCENARIOS / f"{name}.yaml", SIMPY_ALONE[name])
    assert ran(scenario, "simpy") == ran(scenario, "auto")
    assert ran(scenario, "auto")[0] == "simpy"
    with pytest.raises(InputError, match="--engine static does not know"):
        ran(scenario, "static")


def test_processes_run_on_simpy_alone() -> None:
    scenario = load_scenario(SCENARIOS / "processes_dp16.yaml")
    assert ran(scenario, "simpy") == ran(scenario, "auto")
    refused = run("scenarios/processes_dp16.yaml", "--engine", "static")
    assert refused.returncode == 2
    assert "the scenario's processes need SimPy's clock" in refused.stderr


def test_recordings_replay_alike() -> None:
    simpy, passes, small = (replay(two_by_two(), None, engine) for engine in ("simpy", "static", "auto"))
    assert (simpy.path, passes.path, small.path) == ("simpy", "static", "simpy")
    assert (simpy.begin_s, simpy.end_s) == (passes.begin_s, passes.end_s)


def test_weeks_say_that_simpy_ran_them() -> None:
    scenario = load_scenario(SCENARIOS / "dp8.yaml", ["faults.failures={mtbf_s_per_gpu: 1e6}"])
    assert goodput(scenario, 1.0, 5, runs=4, jobs=1).to_json()["engine"] == {"path": "simpy"}
