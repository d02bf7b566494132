"""Transfers laid on the graph's links, shared max-min fairly, take the closed forms' times."""

import pytest

from tests.topology.link_flows import (
    Links,
    cluster,
    exchange_transfers,
    mesh_ring_seconds,
)
from topology.collectives import pairwise_exchange, ring_all_gather, ring_all_reduce
from topology.loads import Traffic, link_loads, ring_transfers
from topology.network import Network

SIZE = float(1 << 28)
SWITCHED = ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "dgx-b300"]


def bare_send_s(network: Network, src: int, dst: int) -> float:
    """A message's α + S/B with no protocol."""
    way = network.path(src, dst)
    return way.latency_s + way.inter_latency_s + SIZE / way.bytes_per_s


@pytest.mark.parametrize("name", [*SWITCHED, "dgx-v100", "cpu-host"])
def test_a_lone_message_inside_a_node(name: str) -> None:
    links = Links(cluster(name, 1))
    network = Network(links.spec)
    for dst in range(1, 8):
        assert bare_send_s(network, 0, dst) == pytest.approx(links.alone_s(0, dst, SIZE), rel=1e-12)


@pytest.mark.parametrize("name", SWITCHED)
@pytest.mark.parametrize(("src", "dst"), [(0, 8), (3, 11), (0, 9), (7, 16)])
def test_a_lone_message_between_nodes(name: str, src: int, dst: int) -> None:
    links = Links(cluster(name, 3))
    assert bare_send_s(Network(links.spec), src, dst) == pytest.approx(links.alone_s(src, dst, SIZE), rel=1e-12)


@pytest.mark.parametrize("kind", ["fat_tree", "rail_optimized"])
@pytest.mark.parametrize("oversubscription", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("name", ["dgx-v100", "dgx-a100", "dgx-b200"])
def test_a_node_sends_to_the_next_with_all_gpus_at_once(name: str, kind: str, oversubscription: float) -> None:
    links = Links(cluster(name, 2, kind=kind, oversubscription=oversubscription))
    at_once = links.seconds([(rank, rank + 8, SIZE) for rank in range(8)])
    latency_s = links.route(0, 8).latency_s
    assert bare_send_s(Network(links.spec), 0, 8) == pytest.approx(latency_s + at_once, rel=1e-12)


@pytest.mark.parametrize("name", SWITCHED)
@pytest.mark.parametrize("ranks", [range(2), range(8), range(16), range(32), range(0, 16, 2), range(0, 32, 4)])
def test_ring_all_reduce(name: str, ranks: range) -> None:
    links = Links(cluster(name, 4))
    group = Network(links.spec).group(ranks)
    sent = SIZE * (len(ranks) - 1) / len(ranks)
    on_links = 2 * links.seconds(ring_transfers(links.spec, ranks, sent))
    assert ring_all_reduce(group, SIZE).transfer_s == pytest.approx(on_links, rel=1e-9)


@pytest.mark.parametrize("name", ["gb200-nvl72", "gb300-nvl72"])
@pytest.mark.parametrize("ranks", [range(8), range(72), range(36, 108)])
def test_ring_all_gather_fills_an_nvl72_before_it_leaves_it(name: str, ranks: range) -> None:
    links = Links(cluster(name, 36))
    group = Network(links.spec).group(ranks)
    sent = SIZE * (len(ranks) - 1) / len(ranks)
    on_links = links.seconds(ring_transfers(links.spec, ranks, sent))
    assert ring_all_gather(group, SIZE).transfer_s == pytest.approx(on_links, rel=1e-9)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_data_parallel_groups_side_by_side_share_the_nics(size: int) -> None:
    """8 / size groups, each with `size` members a node: none gets more than its members' NICs."""
    links = Links(cluster("dgx-h100", 2))
    groups = [[*range(first, first + size), *range(8 + first, 8 + first + size)] for first in range(0, 8, size)]
    sent = SIZE * (2 * size - 1) / (2 * size)
    transfers = [each for ranks in groups for each in ring_transfers(links.spec, ranks, sent)]
    group = Network(links.spec).group(groups[0])
    assert ring_all_gather(group, SIZE).transfer_s == pytest.approx(links.seconds(transfers), rel=1e-9)


@pytest.mark.parametrize("nodes_per_leaf", [1, 2, 4])
@pytest.mark.parametrize("oversubscription", [2.0, 3.0])
def test_an_oversubscribed_ring_crosses_once_a_leaf(nodes_per_leaf: int, oversubscription: float) -> None:
    links = Links(cluster("dgx-a100", 8, nodes_per_leaf=nodes_per_leaf, oversubscription=oversubscription))
    group = Network(links.spec).group(range(64))
    on_links = links.seconds(ring_transfers(links.spec, range(64), SIZE * 63 / 64))
    assert ring_all_gather(group, SIZE).transfer_s == pytest.approx(on_links, rel=1e-9)


@pytest.mark.parametrize("members", [(0, 1, 2), (0, 1, 2, 3), tuple(range(6)), tuple(range(7)), tuple(range(8))])
def test_rings_on_the_cube_mesh(members: tuple[int, ...]) -> None:
    links = Links(cluster("dgx-v100", 1))
    sent = SIZE * (len(members) - 1) / len(members)
    group = Network(links.spec).group(members)
    on_links = mesh_ring_seconds(links, members, sent)
    assert ring_all_gather(group, SIZE).transfer_s == pytest.approx(on_links, rel=1e-9)


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-v100"])
@pytest.mark.parametrize("ranks", [range(4), range(8)])
def test_all_to_all_inside_a_node(name: str, ranks: range) -> None:
    links = Links(cluster(name, 1))
    on_links = links.seconds(exchange_transfers(ranks, SIZE))
    cost = pairwise_exchange(Network(links.spec).group(ranks), SIZE)
    assert cost.transfer_s == pytest.approx(on_links, rel=1e-9)


@pytest.mark.parametrize("kind", ["fat_tree", "rail_optimized"])
@pytest.mark.parametrize("oversubscription", [1.0, 3.0])
def test_all_to_all_between_nodes(kind: str, oversubscription: float) -> None:
    links = Links(cluster("dgx-h100", 3, kind=kind, oversubscription=oversubscription))
    on_links = links.seconds(exchange_transfers(range(24), SIZE))
    cost = pairwise_exchange(Network(links.spec).group(range(24)), SIZE)
    assert cost.transfer_s == pytest.approx(on_links, rel=1e-9)


def test_a_shift_along_one_dimension_of_a_torus() -> None:
    links = Links(cluster("dgx-h100", 27, kind="torus"))
    shift = [(rank, (rank + 8) % 24 + rank // 24 * 24, SIZE) for rank in range(27 * 8)]
    latency_s = links.route(0, 8).latency_s
    assert bare_send_s(Network(links.spec), 0, 8) == pytest.approx(latency_s + links.seconds(shift), rel=1e-9)


def test_all_to_all_on_a_ring_of_nodes_passes_every_link_alike() -> None:
    preset = cluster("dgx-h100", 9, kind="torus", nics_per_node=1)
    links = Links(preset.model_copy(update={"gpus_per_node": 1, "nvlink_domain": 1}))
    on_links = links.seconds(exchange_transfers(range(9), SIZE))
    cost = pairwise_exchange(Network(links.spec).group(range(9)), SIZE)
    assert cost.transfer_s == pytest.approx(on_links, rel=1e-9)


def test_ways_pass_what_they_should() -> None:
    links = Links(cluster("dgx-h100", 2))
    passed = [src for src, _ in links.route(0, 9).loads]
    switches = ["leaf0.1", "spine", "leaf1.1"]
    assert passed == ["gpu0", "nvswitch0", "gpu1", "pcie0.1", "nic0.1", *switches, "nic1.1", "pcie1.1"]
    assert links.route(3, 3).loads == {}


def test_a_ring_that_takes_the_whole_step_fills_its_narrowest_links_and_no_more() -> None:
    links = Links(cluster("dgx-h100", 2))
    cost = ring_all_reduce(Network(links.spec).group(range(16)), SIZE).transfer_s
    loads = link_loads(links.spec, [Traffic("all_reduce", tuple(range(16)), SIZE)], cost)
    assert max(loads.values()) == pytest.approx(1.0)
    half = [Traffic("all_reduce", tuple(range(16)), SIZE / 4, times=2)]
    assert max(link_loads(links.spec, half, cost).values()) == pytest.approx(0.5)


@pytest.mark.parametrize(("nodes", "nics"), [(4, 1), (16, 4), (12, 4), (8, 8)])
def test_rings_over_all_of_a_torus_load_its_links_alike(nodes: int, nics: int) -> None:
    links = Links(cluster("dgx-h100", nodes, kind="torus", nics_per_node=nics))
    group = Network(links.spec).group(range(8 * nodes))
    sent = 2 * SIZE * (8 * nodes - 1) / (8 * nodes)
    between_s = sent / (group.inter_ring_bytes_per_s * 8)
    loads = link_loads(links.spec, [Traffic("all_reduce", tuple(range(8 * nodes)), SIZE)], between_s)
    routers = [busy for (a, b), busy in loads.items() if a.startswith("router") and b.startswith("router")]
    assert len(routers) == sum(a.startswith("router") and b.startswith("router") for a, b in links.graph.edges)
    assert routers == pytest.approx([1.0] * len(routers))


def test_loads_of_an_exchange_and_of_messages_stay_on_their_ways() -> None:
    links = Links(cluster("dgx-a100", 2))
    loads = link_loads(links.spec, [Traffic("send_recv", (0, 8), 25e9 * 0.96)], 2.0)
    assert loads["gpu0", "pcie0.0"] < loads["nic0.0", "leaf0.0"] == pytest.approx(0.5)
    assert ("gpu8", "nvswitch1") not in loads
    assert loads["nic1.0", "leaf1.0"] == loads["nic0.0", "leaf0.0"]  # the last of a ring sends to the first
    inside = link_loads(links.spec, [Traffic("all_to_all", tuple(range(8)), SIZE)], 1.0)
    assert {kind for a, b in inside for kind in (links.graph.edges[a, b]["kind"],)} == {"nvlink"}
