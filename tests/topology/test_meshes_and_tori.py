"""Chips without a switch, each linked to each or on a torus: closed forms against the graph's own links."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.cluster_input import resolve_cluster
from sim.inputs.input_source import Source
from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate
from tests.topology.link_flows import Links, cluster, exchange_transfers
from topology.collectives import (
    mesh_all_gather,
    mesh_all_reduce,
    pairwise_exchange,
    ring_all_gather,
    torus_all_gather,
    torus_all_reduce,
)
from topology.graph import described
from topology.loads import Traffic, link_loads
from topology.network import Network
from topology.presets import CLUSTERS
from topology.recognise import recognise
from topology.shares import collective_load
from topology.torus import ring_links, torus_position

SIZE = float(1 << 28)
LINK = 48e9  # usable of an MI300X's 64 GB/s to each of seven peers


@pytest.mark.parametrize("members", [2, 3, 4, 8])
def test_a_full_mesh_sends_straight_over_the_links_between_its_members(members: int) -> None:
    network = Network(CLUSTERS["mi300x-node"])
    group = network.group(range(members))
    gather_s = SIZE / members / LINK
    assert mesh_all_gather(group, SIZE).transfer_s == pytest.approx(gather_s)
    assert mesh_all_reduce(group, SIZE).transfer_s == pytest.approx(2 * gather_s)
    assert mesh_all_reduce(group, SIZE).latency_s == 2 * group.latency_s
    assert ring_all_gather(group, SIZE).transfer_s == pytest.approx(gather_s)  # rings fill as many links
    assert network.chosen("all_reduce", range(members), SIZE).algorithm == ("ring" if members == 2 else "mesh")


def test_a_pair_of_a_full_mesh_has_one_link() -> None:
    links = Links(cluster("mi300x-node", 1))
    network = Network(links.spec)
    for src, dst in permutations(range(8), 2):
        way = network.path(src, dst)
        assert way.bytes_per_s == pytest.approx(LINK)
        assert way.latency_s + SIZE / way.bytes_per_s == pytest.approx(links.alone_s(src, dst, SIZE), rel=1e-12)
    switched = Network(CLUSTERS["mi300x-node"].model_copy(update={"intra_node": CLUSTERS["dgx-h100"].intra_node}))
    assert network.send(0, 1, SIZE) > 5 * switched.send(0, 1, SIZE)


@pytest.mark.parametrize(
    ("given", "lanes"),
    [
        ({"gpu": "mi300x"}, 7),
        ({"gpu": "mi300x", "gpus_per_node": 2}, 1),
        ({"preset": "mi300x-node", "gpus_per_node": 4}, 3),
        ({"gpu": "mi300x", "gpus_per_node": 2, "intra_node": {"latency_s": 1e-6}}, 1),
        ({"gpu": "mi300x", "gpus_per_node": 2, "intra_node": {"bandwidth_bytes_per_s": 128e9}}, 2),  # as it is stated
        ({"preset": "mi300x-node", "gpus_per_node": 4, "intra_node": {"kind": "nvswitch"}}, 7),  # of a switch, all
    ],
)
def test_a_node_of_fewer_chips_has_only_the_links_between_those(given: dict[str, object], lanes: int) -> None:
    step = {"model": "llama3.2-1b", "training": {"seq_len": 512, "global_batch_size": 8}, "parallelism": {"dp": 8}}
    found = parse_scenario({**step, "cluster": given}).cluster
    assert found.intra_node.bandwidth_bytes_per_s == pytest.approx(lanes * 64e9)
    if found.intra_node.kind == "full_mesh" and "bandwidth_bytes_per_s" not in str(given):
        assert Network(found).path(0, 1).bytes_per_s == pytest.approx(LINK)


@pytest.mark.parametrize("name", ["mi300x-node", "gaudi2-node"])
@pytest.mark.parametrize("members", [(0, 1), (0, 2, 5), tuple(range(8))])
def test_all_at_once_on_the_links_of_the_graph(name: str, members: tuple[int, ...]) -> None:
    links = Links(cluster(name, 1))
    on_links = links.seconds(exchange_transfers(members, SIZE))
    group = Network(links.spec).group(members)
    assert mesh_all_gather(group, SIZE).transfer_s == pytest.approx(on_links, rel=1e-9)
    assert pairwise_exchange(group, SIZE).transfer_s == pytest.approx(on_links, rel=1e-9)


def test_nccl_sends_round_on_a_mesh_too() -> None:
    spec = CLUSTERS["mi300x-node"].model_copy(update={"gpu": CLUSTERS["dgx-h100"].gpu})
    assert Network(spec).chosen("all_reduce", range(8), SIZE).algorithm in ("ring", "tree")


@pytest.mark.parametrize("name", ["mi300x-node", "gaudi3-node", "tpu-v5e-torus", "tpu-v7-torus"])
def test_the_graph_is_recognised_as_the_machine(name: str) -> None:
    spec = CLUSTERS[name].model_copy(update={"nodes": 1 if name.endswith("node") else 27})
    found = recognise(described(spec))
    assert found.topology is None
    ranks = range(8)
    for kind in ("all_reduce", "all_gather", "all_to_all", "send_recv"):
        here, there = (Network(each).collective(kind, ranks, SIZE) for each in (spec, found))
        assert there.seconds == pytest.approx(here.seconds, rel=1e-9)
        assert there.choice == here.choice


def _axis_flows(shape: tuple[int, ...], nodes: list[int]) -> float:
    """Bytes a second that each node can send when all send to both neighbours along every axis of their lattice, by
    those of one link: the links that are there, counted one by one."""
    places = {torus_position(node, shape) for node in nodes}
    first = min(places)
    links = 0.0
    for axis, side in enumerate(shape):
        row = [p for p in places if all(p[i] == first[i] for i in range(len(shape)) if i != axis)]
        links += 0.0 if len(row) == 1 else 2.0 if len(row) == side else 1.0
    return links


@pytest.mark.parametrize(
    ("nodes", "size", "stride"),
    [(64, 4, 1), (64, 16, 1), (64, 64, 1), (64, 2, 1), (64, 4, 4), (64, 4, 16), (512, 8, 8)],
)
def test_a_part_of_a_torus_has_the_links_of_the_axes_that_it_spans(nodes: int, size: int, stride: int) -> None:
    network = Network(CLUSTERS["tpu-v5p-torus"].model_copy(update={"nodes": nodes}))
    ranks = range(0, size * stride, stride)
    shape = network.regular.shape
    links, steps = ring_links(shape, list(ranks))
    assert links * 6 == _axis_flows(shape, list(ranks))
    group = network.group(ranks)
    usable = 90e9  # of one link
    assert torus_all_gather(group, SIZE).transfer_s == pytest.approx(SIZE * (size - 1) / size / (6 * links * usable))
    assert torus_all_reduce(group, SIZE).latency_s == pytest.approx(2 * steps * 1e-6)
    assert network.chosen("all_reduce", ranks, SIZE).algorithm == ("ring" if size == 2 else "torus")


@pytest.mark.parametrize(
    ("name", "nodes", "ranks"),
    [
        ("tpu-v5p-torus", 2, range(2)),
        ("tpu-v5p-torus", 7, range(7)),
        ("tpu-v5p-torus", 16, range(16)),
        ("tpu-v5p-torus", 64, range(4)),
        ("tpu-v5p-torus", 64, range(0, 64, 16)),
        ("tpu-v5p-torus", 512, range(8)),
        ("tpu-v5p-torus", 512, range(4)),
        ("tpu-v5p-torus", 4096, range(2)),
        ("tpu-v5e-torus", 2, range(2)),
        ("tpu-v5e-torus", 32, range(32)),
    ],
)
def test_an_exchange_fills_the_fullest_link_of_the_axes_that_it_spans(name: str, nodes: int, ranks: range) -> None:
    spec = cluster(name, nodes)
    network = Network(spec)
    cost = pairwise_exchange(network.group(ranks), SIZE).transfer_s
    loads = link_loads(spec, [Traffic("all_to_all", tuple(ranks), SIZE)], cost)
    assert max(loads.values()) == pytest.approx(1.0)
    share = collective_load(network, "all_to_all", ranks, SIZE).bytes["nic"]
    between = sum(part * 90e9 * cost for ends, part in loads.items() if all("router" in end for end in ends))
    if name == "tpu-v5p-torus" and 2 not in network.regular.shape:  # a side of two has one link of twice the bandwidth
        assert share == pytest.approx(between / len(ranks))


def test_interleaved_exchanges_share_the_links_of_their_axis() -> None:
    spec = cluster("tpu-v5p-torus", 512)
    groups = [tuple(range(first, 8, 2)) for first in range(2)]
    cost = pairwise_exchange(Network(spec).group(groups[0]), SIZE).transfer_s
    loads = link_loads(spec, [Traffic("all_to_all", group, SIZE) for group in groups], cost)
    assert max(loads.values()) == pytest.approx(1.0)


def test_groups_round_the_end_of_a_row_differ_from_those_along_it() -> None:
    network = Network(CLUSTERS["tpu-v5p-torus"].model_copy(update={"nodes": 64}))
    along, round_the_end = network.group(range(4)), network.group(range(2, 6))
    assert along.inter_ring_bytes_per_s > round_the_end.inter_ring_bytes_per_s


def test_places_left_out_share_the_axis() -> None:
    """Two interleaved groups on a ring of four: each hop passes two links, so each has half of both directions."""
    assert ring_links((4,), [0, 2]) == (0.5, 2)
    far_apart = Network(CLUSTERS["tpu-v5p-torus"].model_copy(update={"nodes": 512}))
    assert far_apart.collective("all_gather", [0, 4], SIZE).latency_s == far_apart.path(0, 4).inter_latency_s
    assert ring_links((4,), [0, 1, 3]) == (0.5, 2)


@pytest.mark.parametrize(
    ("gpu", "algorithm"), [("mi300x", "mesh"), ("gaudi3", "mesh"), ("tpu-v5p", "torus"), ("tpu-v6e", "torus")]
)
def test_a_step_on_such_a_machine_says_that_its_collectives_were_not_measured(gpu: str, algorithm: str) -> None:
    scenario = parse_scenario(
        {
            "model": "llama3.2-1b",
            "training": {"seq_len": 512, "global_batch_size": 8},
            "parallelism": {"dp": 8},
            "cluster": {"gpu": gpu},
            "faults": {"stragglers": [{"rank": 1, "compute_scale": 1.0001}]},  # else one rank stands for all
        }
    )
    assert any("collectives" in warning for warning in scenario.warnings)
    network = Network(scenario.cluster)
    assert network.chosen("all_reduce", range(8), SIZE).algorithm == algorithm
    in_messages = scenario.unchecked_copy(
        update={"engine": scenario.engine.model_copy(update={"collectives": "messages"})}
    )
    assert simulate(in_messages).step_time_s == pytest.approx(simulate(scenario).step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "nodes", "ranks"),
    [
        ("mi300x-node", 1, range(8)),
        ("mi300x-node", 1, range(3)),
        ("gaudi2-node", 1, range(8)),
        ("dgx-v100", 1, range(8)),
        ("mi300x-node", 2, range(16)),
        ("mi300x-node", 4, range(32)),
        ("mi300x-node", 2, range(6, 10)),
        ("mi300x-node", 2, range(0, 16, 8)),
        ("gaudi3-node", 2, range(16)),
        ("dgx-v100", 2, range(16)),
        ("tpu-v5p-torus", 64, range(64)),
        ("tpu-v5p-torus", 64, range(16)),
        ("tpu-v5p-torus", 64, range(0, 64, 16)),
        ("tpu-v5p-torus", 64, range(2)),
        ("tpu-v5e-torus", 16, range(4)),
    ],
)
def test_a_collective_that_takes_the_whole_step_fills_its_links_and_no_more(
    name: str, nodes: int, ranks: range
) -> None:
    spec = cluster(name, nodes)
    cost = ring_all_gather(Network(spec).group(ranks), SIZE).transfer_s
    loads = link_loads(spec, [Traffic("all_gather", tuple(ranks), SIZE)], cost)
    assert max(loads.values()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("more", "latency_s"), [({"gpus_per_node": 1}, 1e-6), ({"inter_node": {"latency_s": 2e-6}}, 2e-6)]
)
def test_keys_beside_a_chip_that_is_a_node_leave_it_its_links(more: dict[str, Any], latency_s: float) -> None:
    for name in ({"gpu": "tpu-v5p"}, {"preset": "tpu-v5p-torus"}):
        found = resolve_cluster({**name, **more}, 8, Source("scenario", {}))
        machine = CLUSTERS["tpu-v5p-torus"]
        links = machine.inter_node.model_copy(update={"latency_s": latency_s})
        assert found == machine.model_copy(update={"nodes": 8, "inter_node": links})


def test_several_such_chips_a_node_need_links_between_them() -> None:
    for name in ({"gpu": "tpu-v5p"}, {"preset": "tpu-v5p-torus"}):
        for key in ("gpus_per_node", "nvlink_domain"):
            with pytest.raises(InputError, match=rf"cluster\.{key}: found 4; in tpu-v5p-torus each chip is a node"):
                resolve_cluster({**name, key: 4}, 8, Source("scenario", {}))
    links = {"kind": "full_mesh", "bandwidth_bytes_per_s": 6e11}
    found = resolve_cluster({"gpu": "tpu-v5p", "gpus_per_node": 4, "intra_node": links}, 8, Source("scenario", {}))
    assert (found.nodes, found.intra_node.bandwidth_bytes_per_s) == (2, 6e11)
