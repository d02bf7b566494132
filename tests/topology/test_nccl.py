"""NCCL's releases by date, and PAT beside rings: its own formula, and the least of NCCL's estimates."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from topology.nccl import OF_TORCH, RELEASES, nccl_at
from topology.network import Network
from topology.presets import CLUSTERS
from topology.spec import ClusterSpec

KIB, MIB = 1 << 10, 1 << 20
SIZES = [1 << power for power in range(10, 33)]
NODES = range(2, 17)


def with_pat(pat: bool | None) -> ClusterSpec:
    cluster = CLUSTERS["dgx-h100"]
    return cluster.model_copy(update={"inter_node": cluster.inter_node.model_copy(update={"pat": pat})})


def apart(nodes: int) -> range:
    return range(0, 8 * nodes, 8)


@pytest.mark.parametrize(
    ("date", "version"),
    [
        ("2020-01", "2.14.3"),  # before the first wheel that asks for one: that one's
        ("2024-06", "2.20.5"),
        ("2024-12-23", "2.21.5"),
        ("2025-04", "2.21.5"),  # torch 2.7 is of the 23rd, and a month is its first day
        ("2025-04-23", "2.26.2"),
        ("2025-09", "2.27.3"),
        ("2026-06", "2.29.7"),
        (None, "2.30.7"),
    ],
)
def test_torch_brings_the_nccl_that_its_wheel_asks_for(date: str | None, version: str) -> None:
    assert nccl_at(date).version == version


@pytest.mark.parametrize(
    ("date", "version"),
    [("2024-05", "2.21.5"), ("2024-09", "2.22.3"), ("2024-10", "2.23.4"), ("2025-02-11", "2.25.1"), (None, "2.30.7")],
)
def test_nvidias_containers_bring_the_newest_of_the_months_before(date: str | None, version: str) -> None:
    assert nccl_at(date, "nvidia").version == version


def test_records_stand_in_order_and_name_each_other() -> None:
    known = {release.version for release in RELEASES}
    assert {version for _, version in OF_TORCH.values()} <= known
    assert all(one.date < other.date and one.pat <= other.pat for one, other in pairwise(RELEASES))
    assert all(one < other for (one, _), (other, _) in pairwise(OF_TORCH.values()))
    released = {release.version: release.date for release in RELEASES}
    assert all(released[version] < day for day, version in OF_TORCH.values())


def test_pat_came_with_2_23() -> None:
    assert next(release.version for release in RELEASES if release.pat) == "2.23.4"


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("nodes", NODES)
def test_the_least_of_nccls_estimates_is_chosen(kind: str, nodes: int) -> None:
    """One GPU a node, constants of NCCL 2.24 to 2.28 written out here: rings in three protocols, and PAT."""
    network, bytes_per_s = Network(with_pat(None)), 48e9
    for size in SIZES:
        sent_s, steps = size * (nodes - 1) / nodes / bytes_per_s * 1e6, nodes - 1
        estimates = {
            "ring LL": 6.6 + steps * 5 + sent_s / 0.5,
            "ring LL128": 14 + steps * 8.5 + sent_s / 0.92,
            "ring Simple": 8.4 + steps * 14 + sent_s,
            "pat Simple": 8 + nodes * 2.8 + math.floor(math.log2(nodes)) * 14 / 3.5 + size / bytes_per_s * 1e6 / 0.75,
        }
        chosen = str(network.chosen(kind, apart(nodes), size))
        assert estimates[chosen] == pytest.approx(min(estimates.values()))


@pytest.mark.parametrize("nodes", NODES)
def test_before_pat_the_least_of_the_older_estimates_is_chosen(nodes: int) -> None:
    """Constants of NCCL 2.20.3: with one GPU a node a ring in LL128 has 0.7 of the bandwidth."""
    network, bytes_per_s = Network(with_pat(False)), 48e9
    for size in SIZES:
        sent_s, steps = size * (nodes - 1) / nodes / bytes_per_s * 1e6, nodes - 1
        estimates = {
            "ring LL": 6.6 + steps * 2.7 + sent_s * 4,
            "ring LL128": 14 + steps * 4 + sent_s / 0.7,
            "ring Simple": 8.4 + steps * 14 + sent_s,
        }
        chosen = str(network.chosen("all_gather", apart(nodes), size))
        assert estimates[chosen] == pytest.approx(min(estimates.values()))


@pytest.mark.parametrize("nodes", [*NODES, 64])
def test_what_takes_pat_takes_its_formula(nodes: int) -> None:
    network = Network(with_pat(True))
    for size in SIZES:
        found = network.collective("reduce_scatter", apart(nodes), size)
        if found.algorithm == "pat Simple":
            start_s = (8 + nodes * 2.8 + math.floor(math.log2(nodes)) * 14 / 3.5) * 1e-6
            sent_s = size * (nodes - 1) / nodes / (48e9 * 0.983 * 0.75)
            assert found.seconds == pytest.approx(start_s + sent_s)


def test_a_byte_takes_pat_over_seven_nodes_and_from_nine_on_and_large_messages_rings() -> None:
    """A ring in LL takes 6.6 + 5(n-1) µs, PAT 8 + 2.8n + 4⌊log2 n⌋: 41.6 and 42.4 over eight nodes."""
    network = Network(with_pat(True))
    for nodes in NODES:
        assert (network.chosen("all_gather", apart(nodes), 1.0).algorithm == "pat") == (nodes == 7 or nodes >= 9)
        assert network.chosen("all_gather", apart(nodes), 1 << 32).algorithm == "ring"


@pytest.mark.parametrize("pat", [True, False])
@pytest.mark.parametrize("nodes", NODES)
def test_more_bytes_never_take_less_time_in_one_algorithm(pat: bool, nodes: int) -> None:
    network = Network(with_pat(pat))
    found = [network.collective("all_gather", apart(nodes), size) for size in SIZES]
    for one, other in pairwise(found):
        if one.algorithm == other.algorithm:
            assert one.seconds < other.seconds


def test_what_is_no_gather_or_has_two_gpus_a_node_does_not_know_pat() -> None:
    with_it, without = Network(with_pat(True)), Network(with_pat(False))
    two_a_node = [rank for node in range(16) for rank in (8 * node, 8 * node + 1)]
    for size in SIZES:
        for kind, ranks in (("all_reduce", range(128)), ("all_to_all", apart(16)), ("all_gather", two_a_node)):
            assert with_it.collective(kind, ranks, size) == without.collective(kind, ranks, size)
        assert with_it.chosen("all_reduce", apart(16), size).algorithm in ("ring", "tree")
