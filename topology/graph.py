"""Build the network that a `ClusterSpec` describes: GPUs, NVLink, PCIe switches, hosts, NICs and switches.

The NVSwitch chips of a domain are one part here, and so are the spine switches. Both are non-blocking. For a regular
cluster, `network` uses closed forms instead of this graph; tests check that both give the same times.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from topology.mesh import links, links_per_gpu
from topology.spec import ClusterSpec
from topology.torus import torus_links, torus_shape
from topology.wiring import Ends, Link, NetworkDevice, Wiring, link_word

if TYPE_CHECKING:
    import networkx as nx

    Graph = nx.DiGraph[str]


def gpu(rank: int) -> str:
    """Return the name of a rank's GPU in the graph."""
    return f"gpu{rank}"


def wiring_of(cluster: ClusterSpec) -> Wiring:
    """Return the parts and links of a cluster: those of its `topology` if it has one, otherwise `described`."""
    return cluster.topology or described(cluster)


def described(cluster: ClusterSpec) -> Wiring:
    """Return the parts and links of a regular cluster, from its description."""
    made = _Made()
    for node in range(cluster.nodes):
        _add_node(made, cluster, node)
        _add_nvlink(made, cluster, node)
    (_add_torus if cluster.inter_node.is_torus else _add_tree)(made, cluster)
    return Wiring(made.parts, made.links, cluster.name, cluster.source)


def build_graph(cluster: ClusterSpec) -> Graph:
    """Return the cluster as a networkx graph: nodes have the fields of `NetworkDevice`, edges `link` and `kind`."""
    import networkx as nx

    wiring = wiring_of(cluster)
    graph: Graph = nx.DiGraph()
    for name, part in wiring.parts.items():
        graph.add_node(name, **part._asdict())
    for (a, b), each in wiring.links.items():
        graph.add_edge(a, b, link=each, kind=link_word(wiring.kind(a), wiring.kind(b)))
    return graph


def link(graph: Graph, src: str, dst: str) -> Link:
    """Return the link between two neighbours of the graph."""
    found = graph.edges[src, dst]["link"]
    assert isinstance(found, Link)
    return found


class _Made:
    """Collect parts and links."""

    def __init__(self) -> None:
        self.parts: dict[str, NetworkDevice] = {}
        self.links: dict[Ends, Link] = {}

    def add(self, part: NetworkDevice) -> str:
        self.parts[part.name] = part
        return part.name

    def join(self, a: str, b: str, bandwidth: float, latency_s: float = 0.0, efficiency: float = 1.0) -> None:
        self.links[a, b] = self.links[b, a] = Link(bandwidth, latency_s, efficiency)


def _add_node(made: _Made, cluster: ClusterSpec, node: int) -> None:
    """Add a node: GPUs and NICs under PCIe switches, and these under the host.

    There is one PCIe switch for each NIC, but at most one for each GPU. A GPU reaches its NIC at PCIe speed, or at the
    NIC's speed if that is higher: such NICs contain a PCIe switch of a newer generation, to which the GPU is wired
    (ConnectX-8 on HGX B300).
    """
    gpus, inter = cluster.gpus_per_node, cluster.inter_node
    host = made.add(NetworkDevice(f"host{node}", "cpu"))
    switches = min(gpus, inter.nics_per_node)
    nics_per_gpu = max(1.0, inter.nics_per_node / gpus)
    per_gpu = max(cluster.gpu.host_bandwidth_bytes_per_s, inter.usable_bytes_per_s * nics_per_gpu)
    for index in range(switches):
        switch = made.add(NetworkDevice(f"pcie{node}.{index}", "pcie"))
        made.join(switch, host, cluster.gpu.host_bandwidth_bytes_per_s)
    for index in range(gpus):
        rank = node * gpus + index
        name = made.add(NetworkDevice(gpu(rank), "gpu", cluster.gpu.name, rank))
        made.join(name, f"pcie{node}.{index * switches // gpus}", per_gpu)
    for index in range(inter.nics_per_node):
        nic = made.add(
            NetworkDevice(
                f"nic{node}.{index}",
                "nic",
                rendezvous=inter.rendezvous,
                transport=inter.transport,
                spread=inter.spread,
                sharp=inter.sharp,
                pat=inter.pat,
            )
        )
        switch = f"pcie{node}.{index * switches // inter.nics_per_node}"
        made.join(switch, nic, inter.nic_bandwidth_bytes_per_s, 0.0, inter.efficiency)


def _add_nvlink(made: _Made, cluster: ClusterSpec, node: int) -> None:
    """Add the node's fast links: to the domain's NVSwitch, between GPUs, or (kind pcie) through the host."""
    gpus, intra = cluster.gpus_per_node, cluster.intra_node
    ranks = range(node * gpus, (node + 1) * gpus)
    if intra.meshed:
        full = intra.all_linked
        lane, count = intra.bandwidth_bytes_per_s / links_per_gpu(gpus, full), links(gpus, full)
        for a, b in product(range(gpus), repeat=2):
            if a < b and count[a][b]:
                made.join(gpu(ranks[a]), gpu(ranks[b]), lane * count[a][b], intra.latency_s, intra.efficiency)
        return
    hub = f"host{node}"
    if intra.switched:
        name = f"nvswitch{ranks[0] // cluster.domain_gpus}"
        hub = made.add(NetworkDevice(name, "nvswitch", nvls_efficiency=intra.nvls_efficiency))
    for rank in ranks:
        made.join(gpu(rank), hub, intra.bandwidth_bytes_per_s, intra.latency_s / 2, intra.efficiency)


def _add_tree(made: _Made, cluster: ClusterSpec) -> None:
    """Add leaf switches under one spine: a leaf for each group of nodes; with rails, one for each group and local NIC.

    If one group holds all nodes, there is no spine.
    """
    inter = cluster.inter_node
    rails = inter.has_rails
    below: dict[str, int] = {}
    for node, nic in product(range(cluster.nodes), range(inter.nics_per_node)):
        group = node // inter.nodes_per_leaf
        leaf = made.add(NetworkDevice(f"leaf{group}.{nic}" if rails else f"leaf{group}", "switch", tier="leaf"))
        made.join(f"nic{node}.{nic}", leaf, inter.nic_bandwidth_bytes_per_s, inter.latency_s / 2, inter.efficiency)
        below[leaf] = below.get(leaf, 0) + 1
    if cluster.nodes <= inter.nodes_per_leaf:
        return
    spine = made.add(NetworkDevice("spine", "switch", tier="spine"))
    for leaf, nics in below.items():
        up = nics * inter.nic_bandwidth_bytes_per_s / inter.oversubscription
        made.join(leaf, spine, up, 0.0, inter.efficiency)


def _add_torus(made: _Made, cluster: ClusterSpec) -> None:
    """Add a router for each node; its NICs are shared evenly among the directions."""
    inter = cluster.inter_node
    shape = torus_shape(cluster.nodes, inter.nics_per_node)
    each_bytes_per_s = inter.nic_bandwidth_bytes_per_s * inter.nics_per_node / (2 * len(shape))
    routers = [f"router{node}" for node in range(cluster.nodes)]
    for node, router in enumerate(routers):
        made.add(NetworkDevice(router, "switch", tier="router"))
        for nic in range(inter.nics_per_node):
            made.join(f"nic{node}.{nic}", router, inter.nic_bandwidth_bytes_per_s, 0.0, inter.efficiency)
    for (a, b), directions in torus_links(shape).items():
        made.join(routers[a], routers[b], each_bytes_per_s * directions, inter.latency_s, inter.efficiency)
