"""NCCL's newer algorithms: PAT with one GPU a node, and switches between nodes that reduce (SHARP)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from topology.collectives import Choice
from topology.durations import duration
from topology.graph import described
from topology.graph_files import from_node_link
from topology.network import Network
from topology.presets import CLUSTERS
from topology.protocols import SIMPLE
from topology.recognise import recognise
from topology.shares import collective_load
from topology.spec import ClusterSpec
from topology.wiring import node_link

MIB, GIB = 1 << 20, 1 << 30
SIZES = [1 << power for power in range(10, 34)]


def with_nics(name: str, **keys: object) -> ClusterSpec:
    cluster = CLUSTERS[name]
    return cluster.model_copy(update={"inter_node": cluster.inter_node.model_copy(update=keys)})


def apart(nodes: int) -> range:
    return range(0, 8 * nodes, 8)


@pytest.mark.parametrize(
    ("nodes", "size", "chosen"),
    [
        (4, 64 << 10, "ring LL"),  # 6.6 + 3 · 5 µs against 8 + 4 · 2.8 + 2 · 14 / 3.5 µs
        (16, 1 << 10, "pat Simple"),
        (16, 2 * MIB, "pat Simple"),
        (16, 32 * MIB, "ring LL128"),
        (128, 64 * MIB, "pat Simple"),
        (128, GIB, "ring Simple"),
    ],
)
def test_pat_is_chosen_by_nccls_estimate(nodes: int, size: float, chosen: str) -> None:
    network = Network(with_nics("dgx-h100", pat=True))
    for kind in ("all_gather", "reduce_scatter"):
        assert str(network.chosen(kind, apart(nodes), size)) == chosen


def test_pat_changes_at_the_size_where_both_estimates_meet() -> None:
    """16 nodes: 8 + 16·2.8 + 4·14/3.5 + S/0.75b in PAT = 14 + 15·8.5 + (15/16)S/0.92b µs in a ring with LL128."""
    cluster = with_nics("dgx-h100", pat=True)
    network = Network(cluster)
    bytes_per_s = cluster.inter_node.usable_bytes_per_s
    meets = (14 + 15 * 8.5 - 8 - 16 * 2.8 - 4 * 14 / 3.5) * 1e-6 * bytes_per_s / (1 / 0.75 - 15 / 16 / 0.92)
    assert network.chosen("all_gather", apart(16), meets * 0.99).algorithm == "pat"
    assert network.chosen("all_gather", apart(16), meets * 1.01).algorithm == "ring"


def test_pat_takes_nccls_time() -> None:
    """64 nodes: 8 + 64·2.8 + 6·14/3.5 µs, then 63/64 of the size at three quarters of the NICs' bandwidth."""
    network = Network(with_nics("dgx-h100", pat=True))
    found = network.collective("all_gather", apart(64), MIB)
    assert found.algorithm == "pat Simple"
    share = 48e9 * 0.983 * 0.75
    assert found.seconds == pytest.approx((8 + 64 * 2.8 + 6 * 14 / 3.5) * 1e-6 + MIB * 63 / 64 / share)
    load = collective_load(network, "all_gather", apart(64), MIB, found.choice)
    assert load.bytes["nic"] == pytest.approx(MIB * 63 / 64)


def test_pat_needs_one_gpu_a_node_and_nccl_that_has_it() -> None:
    here = CLUSTERS["dgx-h100"]
    assert here.inter_node.pat is None
    assert str(Network(here).chosen("all_gather", apart(64), MIB)) == "pat Simple"
    for cluster, ranks, kind in (
        (with_nics("dgx-h100", pat=False), apart(64), "all_gather"),
        (here, range(64), "all_gather"),
        (here, apart(64), "all_reduce"),
        (here, range(8), "all_gather"),
        (with_nics("mi300x-node", pat=True), apart(64), "all_gather"),
    ):
        assert "pat" not in str(Network(cluster).chosen(kind, ranks, MIB))


def test_reducing_switches_halve_what_a_nic_carries() -> None:
    """A large all-reduce over 16 nodes with one GPU each: S through the NIC, instead of 2S(n-1)/n."""
    network, plain = Network(with_nics("dgx-h100", sharp=True)), Network(CLUSTERS["dgx-h100"])
    found, usual = (each.collective("all_reduce", apart(16), 64 * GIB) for each in (network, plain))
    assert (found.algorithm, usual.algorithm) == ("collnet_direct Simple", "ring Simple")
    assert usual.seconds / found.seconds == pytest.approx(2 * 15 / 16, rel=0.02)  # a ring fills its pipeline
    assert network.chosen("all_gather", apart(16), GIB) == plain.chosen("all_gather", apart(16), GIB)


@pytest.mark.parametrize(
    ("name", "ranks", "chosen"),
    [
        ("dgx-h100", range(128), "nvls_sharp Simple"),
        ("dgx-a100", range(128), "collnet_direct Simple"),
        ("dgx-h100", range(8), "nvls Simple"),
        ("dgx-h100", [*range(8), *range(8, 12)], "tree Simple"),
        ("gb200-nvl72", range(144), "ring Simple"),
        ("mi300x-node", range(128), "ring Simple"),
    ],
)
def test_switches_reduce_for_equal_nodes_of_nccl(name: str, ranks: list[int], chosen: str) -> None:
    assert str(Network(with_nics(name, sharp=True)).chosen("all_reduce", ranks, 16 * GIB)) == chosen


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100", "dgx-b200"])
@pytest.mark.parametrize("nodes", [2, 3, 8, 16, 64])
def test_no_wire_carries_more_than_it_can(name: str, nodes: int) -> None:
    """Each algorithm, over whole nodes and over one GPU a node: its time holds its bytes on both levels' links."""
    cluster = with_nics(name, sharp=True, pat=True)
    network, inter, intra = Network(cluster), cluster.inter_node, cluster.intra_node
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        for ranks in (range(8 * nodes), apart(nodes)):
            for size in SIZES:
                found = network.collective(kind, ranks, size)
                load = collective_load(network, kind, ranks, size, found.choice).bytes
                assert load["nic"] / found.seconds <= inter.nic_bandwidth_bytes_per_s
                assert load.get("domain", 0.0) / found.seconds <= intra.bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("kind", "algorithm", "ranks"),
    [
        ("all_reduce", "nvls_sharp", range(32)),
        ("all_reduce", "collnet_direct", range(32)),
        ("all_gather", "pat", apart(32)),
    ],
)
def test_time_grows_with_size_and_not_with_bandwidth(kind: str, algorithm: str, ranks: range) -> None:
    slow, fast = (
        Network(with_nics("dgx-h100", sharp=True, pat=True, nic_bandwidth_bytes_per_s=nic)).group(ranks)
        for nic in (25e9, 100e9)
    )
    times = [duration(kind, algorithm, SIMPLE, slow, size).seconds for size in SIZES]
    assert all(one < more for one, more in pairwise(times))
    assert all(duration(kind, algorithm, SIMPLE, fast, size).seconds <= t for size, t in zip(SIZES, times, strict=True))
    assert Choice(algorithm, SIMPLE).protocol is SIMPLE


def test_a_file_keeps_both_keys() -> None:
    cluster = with_nics("dgx-h100", sharp=True, pat=True).model_copy(update={"nodes": 2})
    found = recognise(from_node_link(node_link(described(cluster))))
    assert found.inter_node == cluster.inter_node
