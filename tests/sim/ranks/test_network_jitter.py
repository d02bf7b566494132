"""What other jobs leave of a shared network."""

from __future__ import annotations

import math
from statistics import NormalDist, median
from typing import Any

import pytest

from sim.inputs.overrides import merge
from sim.inputs.scenario import Scenario, parse_scenario
from sim.ranks.faults import network_of, nic_scales
from sim.simulation import simulate
from tests.sim.cases import scenario_with
from topology.network import Network, left_by_others
from topology.presets import CLUSTERS


def scenario(jitter: dict[str, Any] | None, dp: int = 4, **parallelism: Any) -> Scenario:
    return scenario_with(
        {"seq_len": 1024, "global_batch_size": 16},
        {"tp": 8, "dp": dp, "zero": 1, **parallelism},
        model={"preset": "llama3-8b", "layers": 2},
        faults={"network_jitter": jitter},
    )


def test_no_spread_changes_nothing_and_the_same_seed_is_the_same_network() -> None:
    plain = simulate(scenario(None)).step_time_s
    assert simulate(scenario({"sigma": 0})).step_time_s == plain
    shared = [simulate(scenario({"sigma": 1, "seed": seed})).step_time_s for seed in (3, 3, 4)]
    assert shared[0] == shared[1] != shared[2]
    assert min(shared) > plain


def test_folding_changes_nothing() -> None:
    s = scenario({"sigma": 1, "seed": 2}, pp=2)
    assert simulate(s, expand=True).step_time_s == simulate(s, fold=False).step_time_s


def test_a_collective_goes_at_the_pace_of_the_node_that_has_least() -> None:
    s = scenario({"sigma": 1, "seed": 3})
    left, shared, own = nic_scales(s), network_of(s), Network(s.cluster)
    for ranks in (range(32), range(0, 32, 8), (8, 16)):
        least = min(left.get(rank, 1.0) for rank in ranks)
        expected = own.group(ranks).inter_ring_bytes_per_s * least
        assert shared.group(ranks).inter_ring_bytes_per_s == pytest.approx(expected)
    assert shared.group(range(8)) == own.group(range(8))
    assert shared.path(0, 9).bytes_per_s == pytest.approx(
        own.path(0, 9).bytes_per_s * min(left.get(0, 1.0), left.get(9, 1.0))
    )


@pytest.mark.parametrize("nodes", [2, 16])
def test_the_median_of_the_least_is_that_of_the_distribution(nodes: int) -> None:
    sigma = 0.8
    draws = [
        min(nic_scales(scenario({"sigma": sigma, "seed": seed}, dp=nodes)).values(), default=1.0) for seed in range(300)
    ]
    expected = math.exp(sigma * NormalDist().inv_cdf(1 - 0.5 ** (1 / nodes)))
    assert median(draws) == pytest.approx(expected, rel=0.12)


def test_it_is_blamed() -> None:
    outcome = simulate(scenario({"sigma": 1, "seed": 3})).outcome
    cause = next(cost for cost in outcome.blame if cost.kind == "network")
    assert cause.lost_s > 0


def test_what_it_costs_is_the_step_less_that_on_a_network_of_its_own() -> None:
    """Also where the cluster is shared by itself: its median is no network without other jobs."""
    data = {
        "model": {"preset": "llama3-8b", "layers": 2},
        "training": {"seq_len": 1024, "global_batch_size": 32},
        "parallelism": {"dp": 32, "zero": 1},
    }
    alone = parse_scenario({**data, "cluster": {"preset": "p5-efa", "inter_node": {"spread": 0}}})
    alone_s = simulate(alone).step_time_s
    faults = {"stragglers": [{"rank": 1, "compute_scale": 1.2}], "network_jitter": {"sigma": 0.4, "seed": 1}}
    for found in (faults, {"network_jitter": faults["network_jitter"]}):
        costs = {
            c.kind: c for c in simulate(parse_scenario({**data, "cluster": "p5-efa", "faults": found})).outcome.blame
        }
        assert costs["network"].lost_s > 0
        assert costs["all"].without_s == alone_s
    assert costs["network"].without_s == alone_s


def test_a_spread_gives_every_group_the_median_and_draws_take_its_place() -> None:
    data = {
        "model": "llama3.2-1b",
        "training": {"seq_len": 1024, "global_batch_size": 32},
        "parallelism": {"dp": 32},
        "cluster": "p5-efa",
    }
    shared = parse_scenario(data)
    alone = parse_scenario({**data, "cluster": {"preset": "p5-efa", "inter_node": {"spread": 0}}})
    off = parse_scenario({**data, "faults": {"network_jitter": {"sigma": 0}}})
    own = network_of(alone).group(range(32)).inter_ring_bytes_per_s
    assert network_of(shared).group(range(32)).inter_ring_bytes_per_s == pytest.approx(own * left_by_others(0.8, 4))
    assert network_of(off).group(range(32)).inter_ring_bytes_per_s == own
    assert network_of(shared).chosen("all_reduce", range(32), 1e8) == network_of(alone).chosen(
        "all_reduce", range(32), 1e8
    )


@pytest.mark.parametrize(("cluster", "sigma", "says"), [("p5-efa", 0.3, 1), ("p5-efa", 0.8, 0), ("dgx-h100", 0.3, 0)])
def test_other_draws_than_the_clusters_own_are_said(cluster: str, sigma: float, says: int) -> None:
    data = {
        "model": "llama3.2-1b",
        "training": {"seq_len": 1024, "global_batch_size": 32},
        "parallelism": {"dp": 32},
        "cluster": cluster,
        "faults": {"network_jitter": {"sigma": sigma}},
    }
    found = [
        w for w in parse_scenario(data).warnings if w.startswith("faults.network_jitter: draws with sigma 0.3 take")
    ]
    assert len(found) == says


@pytest.mark.parametrize("spread", [{}, {"spread": 0.5}, {"rendezvous": True}])
def test_nics_that_are_stated_as_efa_s_transport_as_efa_s(spread: dict[str, Any]) -> None:
    """As published tables describe the cluster: number, bandwidth and latency of its NICs. What other jobs take of it
    is no property of its NICs."""
    nics = {"kind": "fat_tree", "nics_per_node": 32, "nic_bandwidth_bytes_per_s": 12.5e9, "latency_s": 75e-6}
    stated = scenario_with(
        {"seq_len": 1024, "global_batch_size": 32},
        model="llama3.2-1b",
        cluster={"preset": "dgx-h100", "inter_node": {**nics, **spread}},
    ).cluster.inter_node
    assert stated == CLUSTERS["p5-efa"].inter_node.model_copy(update={"spread": 0.0, "pat": True, **spread})


@pytest.mark.parametrize(
    ("more", "matched"),
    [
        ({}, True),
        ({"inter_node": {"rendezvous": False}}, False),
        ({"inter_node": {"nic_bandwidth_bytes_per_s": 50e9}}, False),
        ({"intra_node": {"kind": "nvswitch"}}, False),
        ({"gpus_per_node": 8}, False),
    ],
)
def test_four_linked_gpus_with_slingshot_s_nics_match_messages(more: dict[str, Any], matched: bool) -> None:
    """As a published table describes CSCS Alps; InfiniBand and RoCE, and whoever says otherwise, do not."""
    cluster = {
        "gpu": "h100-sxm",
        "gpus_per_node": 4,
        "intra_node": {"kind": "nvlink_mesh", "bandwidth_bytes_per_s": 450e9},
        "inter_node": {"kind": "fat_tree", "nics_per_node": 4, "nic_bandwidth_bytes_per_s": 25e9},
    }
    described = scenario_with({"seq_len": 64, "global_batch_size": 8}, model="gpt2", cluster=merge(cluster, more))
    assert described.cluster.inter_node.rendezvous == matched
