"""What a cut link leaves: the ways of the graph without its edges."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import pytest

from tests.topology.link_flows import cluster
from tests.topology.max_min import transfer_seconds
from topology.detours import joined, left_of_cut
from topology.graph import build_graph, gpu, link
from topology.network import Network
from topology.spec import ClusterSpec
from topology.torus import torus_hops, torus_shape


def ring_bytes_per_s(spec: ClusterSpec, cut: set[str]) -> float:
    """What each GPU of the first node gets when all send to the next, links of the kinds in `cut` taken out."""
    graph = build_graph(spec)
    graph.remove_edges_from([(a, b) for a, b in list(graph.edges) if graph.edges[a, b]["kind"] in cut])
    capacity = {(a, b): link(graph, a, b).usable_bytes_per_s for a, b in graph.edges}
    flows = []
    for rank in range(spec.gpus_per_node):
        way = nx.shortest_path(graph, gpu(rank), gpu((rank + 1) % spec.gpus_per_node))
        flows.append(list(pairwise(way)))
    return 1.0 / max(transfer_seconds(flows, [1.0] * len(flows), capacity))


@pytest.mark.parametrize("name", ["dgx-v100", "dgx-a100", "dgx-h100", "dgx-b200"])
def test_a_node_without_nvlink_goes_over_pcie(name: str) -> None:
    spec = cluster(name, 1)
    left = left_of_cut(spec, 0, 0) * spec.intra_node.usable_bytes_per_s
    over = ring_bytes_per_s(spec, {"nvlink", "nic", "fabric"})
    assert spec.gpu.host_bandwidth_bytes_per_s / 8 <= left <= over * (1 + 1e-9)


def test_trays_of_a_domain_reach_each_other_over_their_nics() -> None:
    spec = cluster("gb200-nvl72", 36)  # two domains
    left = left_of_cut(spec, 0, 1) * spec.intra_node.usable_bytes_per_s
    assert left == pytest.approx(Network(spec).path(0, 72).bytes_per_s)


@pytest.mark.parametrize(("nodes", "nics"), [(8, 8), (27, 8), (64, 8), (12, 4), (4, 1), (7, 1), (2, 4), (16, 4)])
def test_a_torus_goes_round(nodes: int, nics: int) -> None:
    spec = cluster("dgx-h100", nodes, kind="torus", nics_per_node=nics)
    routers = build_graph(spec).subgraph([f"router{n}" for n in range(nodes)])
    shape = torus_shape(nodes, nics)
    for other in range(1, nodes):
        assert joined(spec, 0, other) == (torus_hops(0, other, shape) == 1)
        if not joined(spec, 0, other):
            assert left_of_cut(spec, 0, other) == 0
            continue
        graph = nx.DiGraph(routers)
        graph.remove_edges_from([("router0", f"router{other}"), (f"router{other}", "router0")])
        hops = (
            nx.shortest_path_length(graph, "router0", f"router{other}")
            if nx.has_path(graph, "router0", f"router{other}")
            else float("inf")
        )
        assert left_of_cut(spec, 0, other) == pytest.approx(1 / hops)


@pytest.mark.parametrize("kind", ["fat_tree", "rail_optimized"])
def test_nodes_of_a_tree_have_no_other_way(kind: str) -> None:
    assert left_of_cut(cluster("dgx-h100", 4, kind=kind), 1, 3) == 0
    assert left_of_cut(cluster("cpu-host", 2), 1, 1) == 0
