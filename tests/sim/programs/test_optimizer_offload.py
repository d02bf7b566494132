"""`training.optimizer_offload: cpu`: the host's CPUs update the parameters, in their memory's bandwidth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario
from sim.models.parameters import count_parameters
from sim.prices.rank_prices import HOST_EFFICIENCY
from sim.simulation import simulate
from tests.sim.cases import scenario_with

SHIPPED = Path(__file__).parents[3] / "scenarios"


def scenario(offload: object, dp: int = 8, zero: int = 2, cluster: Any = "dgx-h100", **training: Any) -> Scenario:
    return scenario_with(
        {"seq_len": 1024, "global_batch_size": dp, "optimizer_offload": offload, **training},
        {"dp": dp, "zero": zero},
        model="llama3.2-1b",
        cluster=cluster,
    )


def host_s(used: Scenario) -> float:
    """Return the seconds of the host's update; the gradients are scaled there alone."""
    rows = {row["operator"]: row["seconds"] for row in simulate(used).result["time_by_operator"][0]["operators"]}
    assert "grad_scale" not in rows
    return rows["adamw on the host"]


@pytest.mark.parametrize(("clipped", "each"), [(True, 42), (False, 34)])
def test_the_update_takes_its_bytes_in_the_bandwidth_of_host_memory(clipped: bool, each: int) -> None:
    """All ranks of a node together move 42 bytes of each parameter, however the states are cut."""
    used = scenario("cpu", gradient_clipping=clipped)
    bandwidth = used.cluster.host_memory_bandwidth_bytes_per_s
    assert bandwidth == 614.4e9
    whole = count_parameters(used.model).total * each / (bandwidth * HOST_EFFICIENCY)
    assert host_s(used) == pytest.approx(whole, rel=1e-3)


def test_two_nodes_halve_the_time_and_replicas_on_a_node_share_it() -> None:
    assert host_s(scenario("cpu", dp=16)) == pytest.approx(host_s(scenario("cpu")) / 2, rel=1e-3)
    assert host_s(scenario("cpu", zero=0)) == pytest.approx(8 * host_s(scenario("cpu")), rel=1e-3)


def test_gradients_go_to_the_host_in_fp32_and_parameters_come_back_in_16_bits() -> None:
    result = simulate(scenario("cpu")).result
    shard = count_parameters(scenario("cpu").model).total / 8
    copied = {r["kind"]: r["bytes"] for r in result["communication"] if r["rank"] == 0 and r["group"] == "host"}
    assert copied["offload"] == pytest.approx(4 * shard, rel=1e-3)
    assert copied["reload"] == pytest.approx(2 * shard, rel=1e-3)


@pytest.mark.parametrize(("zero", "out", "back"), [(2, 4, 2), (3, 2 + 4, 2 + 2)])
def test_deepspeeds_third_stage_sends_gradients_while_the_backward_runs(zero: int, out: int, back: int) -> None:
    """stage3.py, `partition_grads`: the 16-bit sum goes to the host and comes back, and goes there in fp32."""
    result = simulate(scenario("cpu", zero=zero, framework="deepspeed")).result
    shard = count_parameters(scenario("cpu").model).total / 8
    copied = {r["kind"]: r["bytes"] for r in result["communication"] if r["rank"] == 0 and r["group"] == "host"}
    assert (copied["offload"], copied["reload"]) == pytest.approx((out * shard, back * shard), rel=1e-3)


def test_states_never_visit_the_gpu() -> None:
    here, visits, away = (simulate(scenario(offload, zero=0)) for offload in (False, True, "cpu"))
    assert here.result["memory"][0]["optimizer"] > 0
    assert visits.result["memory"][0]["optimizer"] == away.result["memory"][0]["optimizer"] == 0
    assert away.peak_memory_bytes < visits.peak_memory_bytes < here.peak_memory_bytes


@pytest.mark.parametrize(
    ("framework", "zero", "here"), [("deepspeed", 3, False), ("deepspeed", 2, False), ("eager", 3, True)]
)
def test_deepspeed_keeps_shards_of_gradients_on_the_host(framework: str, zero: int, here: bool) -> None:
    """deepspeed/runtime/zero/stage3.py: grad_partitions_flat_buffer is on the optimizer's device."""
    away, usual = (simulate(scenario(offload, zero=zero, framework=framework)) for offload in ("cpu", False))
    assert (away.result["memory"][0]["gradients"] > 0) is here
    assert usual.result["memory"][0]["gradients"] > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cluster": "mi300x-node"}, "cluster.host_memory_bandwidth_bytes_per_s: is missing"),
        ({"optimizer": "sgd"}, "found 'cpu'; on the host adamw is simulated, not sgd"),
        ({"offload": "nvme"}, "found 'nvme'; must be false, true or 'cpu'"),
    ],
)
def test_what_cannot_be_simulated_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        scenario(**{"offload": "cpu", **changes})


def test_a_bandwidth_of_one_s_own() -> None:
    own = {"preset": "mi300x-node", "host_memory_bandwidth_bytes_per_s": 614.4e9}
    assert host_s(scenario("cpu", cluster=own)) == pytest.approx(host_s(scenario("cpu")), rel=1e-6)


def test_a_file_of_links_leaves_the_bandwidth_to_the_scenario_and_mixed_nodes_have_the_least() -> None:
    links = {"topology": str(SHIPPED / "networks" / "slow_nic.json"), "host_memory_bandwidth_bytes_per_s": 614.4e9}
    assert host_s(scenario("cpu", dp=16, cluster=links)) == pytest.approx(host_s(scenario("cpu", dp=16)), rel=1e-6)
    mixed = {"mixed": [{"preset": "dgx-h100", "nodes": 1}, {"preset": "dgx-a100", "nodes": 1}]}
    assert scenario("cpu", dp=16, cluster=mixed).cluster.host_memory_bandwidth_bytes_per_s == 409.6e9
