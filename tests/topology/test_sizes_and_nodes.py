"""What a user of a few nodes sees in nccl-tests, from 1 KiB to 8 GiB, and what the network allows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from topology.network import CollectiveCost, Network
from topology.presets import CLUSTERS
from topology.shares import collective_load
from topology.spec import ClusterSpec

SIZES = [1 << power for power in range(10, 34)]
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LARGE = float(1 << 40)  # latencies no longer count


def machine(name: str, nodes: int, **keys: object) -> ClusterSpec:
    cluster = CLUSTERS[name]
    inter = cluster.inter_node.model_copy(update=keys)
    return cluster.model_copy(update={"nodes": nodes, "inter_node": inter})


def costs(network: Network, kind: str, ranks: range) -> list[CollectiveCost]:
    return [network.collective(kind, ranks, size) for size in SIZES]


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_bus_bandwidth_is_nccl_tests_and_below_the_wires(kind: str, nodes: int) -> None:
    """nccl-tests, doc/PERFORMANCE.md: size / time · 2(n-1)/n for an all-reduce, (n-1)/n for the others."""
    cluster, ranks = machine("dgx-h100", nodes), range(8 * nodes)
    network, n = Network(cluster), 8 * nodes
    factor = (2 if kind == "all_reduce" else 1) * (n - 1) / n
    for size, cost in zip(SIZES, costs(network, kind, ranks), strict=True):
        assert cost.bus_bandwidth_bytes_per_s == pytest.approx(size / cost.seconds * factor)
        sent = collective_load(network, kind, ranks, size, cost.choice).bytes
        assert sent["nic"] <= cost.seconds * cluster.inter_node.usable_bytes_per_s
        assert sent.get("domain", 0.0) <= cost.seconds * cluster.intra_node.usable_bytes_per_s


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100", "dgx-b200", "gb200-nvl72"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_larger_message_takes_longer_unless_nccl_changes_its_choice(name: str, kind: str) -> None:
    """At a change of algorithm or protocol it may take less, as in measured tables; here at most a third less."""
    network = Network(machine(name, 16))
    gpus = CLUSTERS[name].gpus_per_node
    for ranks in (range(8), range(16), range(128), range(0, 16 * gpus, gpus)):
        for one, more in pairwise(costs(network, kind, ranks)):
            least = 1.0 if one.choice == more.choice else 2 / 3
            assert more.seconds >= least * one.seconds * (1 - 1e-12)


@pytest.mark.parametrize("nodes", [4, 8, 16])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_large_rings_over_nodes_reach_the_bandwidth_of_all_nics(kind: str, nodes: int) -> None:
    """All bytes cross a node's boundary once (twice in an all-reduce): 8 · 48 GB/s, 0.983 of it."""
    network, ranks = Network(machine("dgx-h100", nodes)), range(8 * nodes)
    found = network.collective(kind, ranks, LARGE)
    assert found.choice.algorithm == "ring"
    assert 0.98 < found.bus_bandwidth_bytes_per_s / (8 * 48e9 * 0.983) <= 1.0  # the rest fills the pipeline


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
@pytest.mark.parametrize("kind", ["rail_optimized", "fat_tree"])
def test_a_large_all_to_all_sends_what_leaves_its_node_through_its_nic(kind: str, nodes: int) -> None:
    """S(n-8)/n through a GPU's own NIC of 48 GB/s: the parts for the node's seven others cross NVLink meanwhile."""
    network, n = Network(machine("dgx-h100", nodes, kind=kind)), 8 * nodes
    assert network.collective("all_to_all", range(n), LARGE).seconds == pytest.approx(
        LARGE * (n - 8) / n / 48e9, rel=1e-3
    )


@pytest.mark.parametrize(("over", "nodes_per_leaf"), [(1.0, 4), (2.0, 1), (2.0, 4), (4.0, 4), (8.0, 8)])
def test_oversubscription_divides_what_an_all_to_all_sends_above_its_leaf(over: float, nodes_per_leaf: int) -> None:
    """16 nodes, L under a leaf: S·max((n-8)/n, o(n-8L)/n) / b: all that leaves the node, or o times what leaves L."""
    spec = machine("dgx-h100", 16, kind="fat_tree", oversubscription=over, nodes_per_leaf=nodes_per_leaf)
    sent = max(128 - 8, over * (128 - 8 * nodes_per_leaf)) / 128
    found = Network(spec).collective("all_to_all", range(128), LARGE).seconds
    assert found == pytest.approx(LARGE * sent / 48e9, rel=1e-3)


@pytest.mark.parametrize(("chips", "links"), [(4, 4), (8, 4), (16, 4)])
def test_an_all_to_all_on_a_ring_of_chips_is_held_by_its_middle(chips: int, links: int) -> None:
    """A ring of c chips: a byte goes c/4 hops in the mean, over a chip's two links, so S·c/8 / b of a link."""
    spec = machine("tpu-v5e-torus", chips)
    inter = spec.inter_node.model_copy(update={"nics_per_node": 2})
    network = Network(spec.model_copy(update={"inter_node": inter}))
    assert network.regular.shape == (chips,)
    b = inter.usable_bytes_per_s
    found = network.collective("all_to_all", range(chips), LARGE).seconds
    assert found == pytest.approx(LARGE * chips / 8 / b, rel=1e-3)


def test_an_nvl72_keeps_an_all_to_all_on_nvlink_and_two_racks_do_not() -> None:
    """64 GPUs of a rack: S·63/64 over NVLink. Over two racks of 64, half of S goes through a GPU's own NIC."""
    spec = machine("gb200-nvl72", 36).model_copy(update={"nvlink_domain": 64})
    network = Network(spec)
    inside = network.collective("all_to_all", range(64), LARGE)
    share = network.group(range(64)).timing.direct.share
    links = spec.intra_node.usable_bytes_per_s * share
    assert inside.seconds == pytest.approx(LARGE * 63 / 64 / links, rel=0.02)  # beside the copy of the own block
    over = network.collective("all_to_all", range(128), LARGE)
    assert over.seconds == pytest.approx(LARGE / 2 / spec.inter_node.usable_bytes_per_s, rel=1e-3)
