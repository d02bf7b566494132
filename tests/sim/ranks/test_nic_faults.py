"""A slow NIC: which groups it slows, what it costs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario, parse_scenario
from sim.ranks.faults import network_of, nic_scales
from sim.simulation import simulate


def scenario(fault: dict[str, Any] | None = None, preset: str = "dgx-h100", **layout: int) -> Scenario:
    return parse_scenario(
        {
            "model": "llama3.2-1b",
            "calibration": "roofline",
            "training": {"seq_len": 1024, "global_batch_size": 48, "precision": "fp16"},
            "cluster": {"preset": preset},
            "parallelism": {"tp": 8, "dp": 3, **layout},
            **({} if fault is None else {"faults": {"nics": [{"node": "node1", **fault}]}}),
        }
    )


def test_one_nic_slows_the_groups_that_pass_it_and_all_of_a_node_s_slow_all() -> None:
    whole, one, every = (scenario(f) for f in (None, {"nic": 3, "bandwidth_scale": 0.25}, {"bandwidth_scale": 0.25}))
    assert nic_scales(one) == {11: 0.25}
    assert nic_scales(every) == dict.fromkeys(range(8, 16), 0.25)
    healthy = network_of(whole).group((3, 11, 19)).inter_ring_bytes_per_s
    for rank in range(8):  # a data-parallel group has one rank of each node, on the same rail
        members = (rank, rank + 8, rank + 16)
        found = [network_of(s).group(members).inter_ring_bytes_per_s / healthy for s in (one, every)]
        assert found == pytest.approx([0.25 if rank == 3 else 1.0, 0.25])
    beside = network_of(every).group((0, 16)).inter_ring_bytes_per_s
    assert beside == network_of(whole).group((0, 16)).inter_ring_bytes_per_s
    assert network_of(one).path(11, 3).bytes_per_s == pytest.approx(0.25 * network_of(whole).path(11, 3).bytes_per_s)
    assert network_of(one).group(range(8, 16)) == network_of(whole).group(range(8, 16))


def test_gpus_that_share_a_nic_all_suffer() -> None:
    assert nic_scales(scenario({"nic": 1, "bandwidth_scale": 0.5}, "dgx-v100")) == {10: 0.5, 11: 0.5}
    assert nic_scales(scenario({"nic": 13, "bandwidth_scale": 0.5}, "p5-efa")) == {11: 0.5}


def test_its_cost_is_the_step_s_and_is_blamed() -> None:
    slow, whole = simulate(scenario({"nic": 3, "bandwidth_scale": 0.1})), simulate(scenario())
    assert slow.step_time_s > whole.step_time_s
    cause = next(cost for cost in slow.outcome.blame if cost.kind == "nic")
    assert cause.cause == "NIC 3 of node1, 0.1 of the bandwidth"
    assert cause.lost_s == pytest.approx(slow.step_time_s - whole.step_time_s)
    assert simulate(scenario({"bandwidth_scale": 1.0})).step_time_s == whole.step_time_s


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"nic": 8}, "faults.nics.nic: found 8; a node has NICs 0 to 7"),
        ({"node": "node3"}, "node0 to node2"),
        ({"bandwidth_scale": 0}, "must be above 0; a NIC that is down is left out of a network file"),
        ({"node": 0}, "must be a node's name: node0"),
        ({"bandwidth_scale": 2}, "must be at most 1"),
    ],
)
def test_what_cannot_be_is_refused(fault: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        scenario(fault)
    assert said in str(error.value).replace("[0]", "")
