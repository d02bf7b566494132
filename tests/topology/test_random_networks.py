"""Random networks: regular ones with links made slower, faster or cut at random."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.topology.link_flows import seconds_per_byte
from tests.topology.max_min import max_min_rates
from topology.collectives import pairwise_exchange, ring_all_gather
from topology.contention import shared_fractions
from topology.graph import described
from topology.graph_files import TopologyError, check
from topology.loads import ring_transfers
from topology.network import Network
from topology.presets import CLUSTERS
from topology.recognise import recognise
from topology.routes import Routes
from topology.spec import ClusterSpec
from topology.wiring import Wiring

SIZE = float(1 << 28)
NAMES = ["dgx-h100", "dgx-a100", "dgx-v100", "gb200-nvl72", "cpu-host", "p5-efa"]


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    """A small cluster of a random kind whose links differ."""
    name = draw(st.sampled_from(NAMES))
    preset = CLUSTERS[name]
    gpus = 8 if name == "dgx-v100" else draw(st.sampled_from([2, 4]))
    kinds = ["fat_tree", "rail_optimized"]
    inter = preset.inter_node.model_copy(
        update={
            "kind": draw(st.sampled_from(kinds)),
            "nics_per_node": draw(st.sampled_from([1, 2, gpus])),
            "oversubscription": draw(st.sampled_from([1.0, 2.0, 3.0])),
            "nodes_per_leaf": draw(st.sampled_from([1, 2])),
            "spread": 0.0,
        }
    )
    spec = preset.model_copy(
        update={"gpus_per_node": gpus, "nvlink_domain": gpus, "nodes": draw(st.integers(2, 4)), "inter_node": inter}
    )
    wiring = described(spec)
    links = dict(wiring.links)
    ends = sorted({tuple(sorted(pair)) for pair in links})
    for a, b in draw(st.lists(st.sampled_from(ends), max_size=6, unique=True)):
        scale = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 2.0]))
        for pair in ((a, b), (b, a)):
            each = links.pop(pair)
            if scale:
                links[pair] = each._replace(bandwidth_bytes_per_s=each.bandwidth_bytes_per_s * scale)
    changed = Wiring(wiring.parts, links, spec.name)
    try:
        check(changed)
        return recognise(changed)
    except TopologyError:
        return spec


def widest(spec: ClusterSpec, inside: set[int], outside: set[int]) -> float:
    """What the network can carry from some GPUs to others at most: its narrowest cut."""
    wiring = spec.topology or described(spec)
    graph: Any = nx.DiGraph()
    for (a, b), each in wiring.links.items():
        graph.add_edge(a, b, capacity=each.usable_bytes_per_s)
    for rank in inside:
        graph.add_edge("from", wiring.ranks[rank])
    for rank in outside:
        graph.add_edge(wiring.ranks[rank], "to")
    return float(nx.maximum_flow_value(graph, "from", "to"))


@settings(max_examples=60, deadline=None)
@given(spec=clusters(), data=st.data())
def test_no_collective_is_faster_than_the_narrowest_cut_allows(spec: ClusterSpec, data: st.DataObject) -> None:
    """A ring sends (n-1)/n of the bytes out of every part of its ranks, an exchange those of all that lie beyond."""
    per_node = spec.gpus_per_node
    nodes = sorted(data.draw(st.sets(st.integers(0, spec.nodes - 1), min_size=2)))
    local = sorted(data.draw(st.sets(st.integers(0, per_node - 1), min_size=1)))
    ranks = [node * per_node + index for node in nodes for index in local]
    n, group = len(ranks), Network(spec).group(ranks)
    for node in nodes:
        inside = {rank for rank in ranks if rank // per_node == node}
        carries = widest(spec, inside, set(ranks) - inside)
        ring_s = SIZE * (n - 1) / n / carries
        assert ring_all_gather(group, SIZE).transfer_s >= ring_s * (1 - 1e-9)
        exchange_s = SIZE / n * len(inside) * (n - len(inside)) / carries
        assert pairwise_exchange(group, SIZE).transfer_s >= exchange_s * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(spec=clusters(), data=st.data())
def test_random_flows_on_its_routes_are_max_min_fair(spec: ClusterSpec, data: st.DataObject) -> None:
    """By an account written for itself; no link carries more than it can, and every flow has a full one."""
    wiring = spec.topology or described(spec)
    routes, ranks = Routes(wiring, spec), st.integers(0, len(wiring.ranks) - 1)
    pairs = data.draw(st.lists(st.tuples(ranks, ranks).filter(lambda p: p[0] != p[1]), min_size=1, max_size=12))
    ways = [routes.passage(*pair).loads for pair in pairs]
    capacity = {ends: each.usable_bytes_per_s for ends, each in wiring.links.items()}
    alone = [1 / seconds_per_byte(routes.passage(*pair), wiring) for pair in pairs]
    loads = [{e: part * rate for e, part in way.items()} for way, rate in zip(ways, alone, strict=True)]
    kept = shared_fractions(loads, capacity)
    carried: dict[tuple[str, str], float] = {}
    for load, part in zip(loads, kept, strict=True):
        for ends, rate in load.items():
            carried[ends] = carried.get(ends, 0.0) + rate * part
    assert all(rate <= capacity[ends] * (1 + 1e-9) for ends, rate in carried.items())
    for load in loads:
        assert any(carried[ends] >= capacity[ends] * (1 - 1e-9) for ends in load)
    if all(set(way.values()) == {1.0} for way in ways):
        expected = max_min_rates([tuple(way) for way in ways], capacity)
        assert [a * k for a, k in zip(alone, kept, strict=True)] == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(spec=clusters())
def test_every_route_is_a_way_of_links_from_one_end_to_the_other(spec: ClusterSpec) -> None:
    wiring = spec.topology or described(spec)
    routes = Routes(wiring, spec)
    last = len(wiring.ranks) - 1
    for src, dst in [*pairwise(range(last + 1)), (0, last), (last, 0)]:
        loads = routes.passage(src, dst).loads
        for name in {end for ends in loads for end in ends}:
            out = sum(load for (a, _), load in loads.items() if a == name)
            into = sum(load for (_, b), load in loads.items() if b == name)
            ends = (name == wiring.ranks[src]) - (name == wiring.ranks[dst])
            assert out - into == pytest.approx(ends, abs=1e-9)


def test_a_ring_of_the_whole_is_that_of_its_transfers() -> None:
    """The account of a changed network is that of the transfers on its own routes."""
    wiring = described(CLUSTERS["dgx-h100"].model_copy(update={"nodes": 3}))
    links = dict(wiring.links)
    for ends in (("nic1.4", "leaf1.4"), ("leaf1.4", "nic1.4")):
        links[ends] = links[ends]._replace(bandwidth_bytes_per_s=20e9)
    spec = recognise(Wiring(wiring.parts, links))
    routes = Routes(Wiring(wiring.parts, links), spec)
    loads: dict[tuple[str, str], float] = {}
    for src, dst, size in ring_transfers(spec, range(24), SIZE * 23 / 24):
        for ends, part in routes.passage(src, dst).loads.items():
            loads[ends] = loads.get(ends, 0.0) + size * part
    slowest = max(load / links[ends].usable_bytes_per_s for ends, load in loads.items())
    assert ring_all_gather(Network(spec).group(range(24)), SIZE).transfer_s == pytest.approx(slowest)
