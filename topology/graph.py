"""The cluster as a graph: GPUs, NVSwitches or mesh links, PCIe switches, hosts, NICs, leaf and spine
switches.

Every link is two directed edges, one a direction, each with a typed `Link`. What a vendor bundles is one node
here: the NVSwitch chips of a domain, the spine switches of the fabric; neither blocks, for each is wired to
carry all it can receive. The closed forms of `network` do without the graph; tests hold the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from topology.mesh import links, links_per_gpu
from topology.spec import ClusterSpec
from topology.torus import torus_position, torus_shape

if TYPE_CHECKING:
    import networkx as nx

    Graph = nx.DiGraph[str]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a link. `kind`: nvlink, peer (GPU to GPU over PCIe), pcie, nic or fabric."""

    kind: str
    bandwidth_bytes_per_s: float
    latency_s: float


def gpu(rank: int) -> str:
    """Name of a rank's GPU in the graph."""
    return f"gpu{rank}"


def build_graph(cluster: ClusterSpec) -> Graph:
    """The graph of `cluster.nodes` nodes; edge attribute `link` is a `Link`, node attribute `kind` a word.

    Kinds: gpu, nvswitch, pcie, host, nic, leaf, spine, router (of a torus's node).
    """
    import networkx as nx

    graph: Graph = nx.DiGraph()
    for node in range(cluster.nodes):
        _add_node(graph, cluster, node)
        _add_nvlink(graph, cluster, node)
    {"torus": _add_torus}.get(cluster.inter_node.kind, _add_tree)(graph, cluster)
    return graph


def link(graph: Graph, src: str, dst: str) -> Link:
    """The link on the edge between two neighbours of the graph."""
    found = graph.edges[src, dst]["link"]
    assert isinstance(found, Link)
    return found


def _join(graph: Graph, ends: tuple[str, str], kind: str, bandwidth: float, latency_s: float) -> None:
    for src, dst in (ends, ends[::-1]):
        graph.add_edge(src, dst, link=Link(kind, bandwidth, latency_s))


def _add(graph: Graph, name: str, kind: str) -> str:
    graph.add_node(name, kind=kind)
    return name


def _add_node(graph: Graph, cluster: ClusterSpec, node: int) -> None:
    """GPUs and NICs of a node under PCIe switches, one a NIC (at most one a GPU), those under the host.

    A GPU reaches its NIC at PCIe speed, or at the NIC's where that is faster: such NICs hold a switch of a
    newer generation, to which the GPU is wired (ConnectX-8 on HGX B300).
    """
    gpus, inter = cluster.gpus_per_node, cluster.inter_node
    host = _add(graph, f"host{node}", "host")
    switches = min(gpus, inter.nics_per_node)
    per_gpu = max(cluster.gpu.host_bandwidth_bytes_per_s, inter.usable_bytes_per_s)
    for index in range(switches):
        switch = _add(graph, f"pcie{node}.{index}", "pcie")
        _join(graph, (switch, host), "pcie", cluster.gpu.host_bandwidth_bytes_per_s, 0.0)
    for index in range(gpus):
        name = _add(graph, gpu(node * gpus + index), "gpu")
        _join(graph, (name, f"pcie{node}.{index * switches // gpus}"), "pcie", per_gpu, 0.0)
    for index in range(inter.nics_per_node):
        nic = _add(graph, f"nic{node}.{index}", "nic")
        switch = f"pcie{node}.{index * switches // inter.nics_per_node}"
        _join(graph, (switch, nic), "pcie", inter.usable_bytes_per_s, 0.0)


def _add_nvlink(graph: Graph, cluster: ClusterSpec, node: int) -> None:
    """The node's fast links: to the domain's NVSwitch, between GPUs, or (kind pcie) through the host."""
    gpus, intra = cluster.gpus_per_node, cluster.intra_node
    ranks = range(node * gpus, (node + 1) * gpus)
    if intra.kind == "nvlink_mesh":
        lane = intra.usable_bytes_per_s / links_per_gpu(gpus)
        for a, b in product(range(gpus), repeat=2):
            if a < b and links(gpus)[a][b]:
                ends = (gpu(ranks[a]), gpu(ranks[b]))
                _join(graph, ends, "nvlink", lane * links(gpus)[a][b], intra.latency_s)
        return
    nvswitch = intra.kind == "nvswitch"
    hub = _add(graph, f"nvswitch{ranks[0] // cluster.domain_gpus}", "nvswitch") if nvswitch else f"host{node}"
    kind = "nvlink" if nvswitch else "peer"
    for rank in ranks:
        _join(graph, (gpu(rank), hub), kind, intra.usable_bytes_per_s, intra.latency_s / 2)


def _add_tree(graph: Graph, cluster: ClusterSpec) -> None:
    """Leaf switches under one spine: a leaf a group of nodes, or on rails one a group and local NIC."""
    inter = cluster.inter_node
    rails = inter.kind == "rail_optimized"
    spine = _add(graph, "spine", "spine")
    for node, nic in product(range(cluster.nodes), range(inter.nics_per_node)):
        group = node // inter.nodes_per_leaf
        leaf = _add(graph, f"leaf{group}.{nic}" if rails else f"leaf{group}", "leaf")
        _join(graph, (f"nic{node}.{nic}", leaf), "nic", inter.usable_bytes_per_s, inter.latency_s / 2)
    leaves = [name for name in graph if graph.nodes[name]["kind"] == "leaf"]
    for leaf in leaves:
        below = graph.out_degree(leaf) * inter.usable_bytes_per_s
        _join(graph, (leaf, spine), "fabric", below / inter.oversubscription, 0.0)


def _add_torus(graph: Graph, cluster: ClusterSpec) -> None:
    """A router a node, its NICs shared evenly among the directions; two ways round a side of 2 are one
    link."""
    inter = cluster.inter_node
    shape = torus_shape(cluster.nodes, inter.nics_per_node)
    a_link = inter.usable_bytes_per_s * inter.nics_per_node / (2 * len(shape))
    routers = {torus_position(node, shape): f"router{node}" for node in range(cluster.nodes)}
    for node, (position, router) in enumerate(routers.items()):
        _add(graph, router, "router")
        for nic in range(inter.nics_per_node):
            _join(graph, (f"nic{node}.{nic}", router), "nic", inter.usable_bytes_per_s, 0.0)
        for axis, side in enumerate(shape):
            if side == 1:
                continue
            place = list(position)
            place[axis] = (position[axis] + 1) % side
            other = routers[tuple(place)]
            _join(graph, (router, other), "fabric", a_link * (2 if side == 2 else 1), inter.latency_s)
