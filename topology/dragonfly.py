"""Build Dragonfly+ networks: groups of leaf and spine switches; each spine is joined to its peer in every other group.

A. Shpiner et al., "Dragonfly+: Low Cost Topology for Scaling Datacenters", HiPINEB 2017.
"""

from __future__ import annotations

from topology.graph import described
from topology.spec import ClusterSpec
from topology.wiring import Link, NetworkDevice, Wiring

GLOBAL_S = 0.5e-6  # 100 m of fibre


def dragonfly_plus(cluster: ClusterSpec, groups: int) -> Wiring:
    """Return the network of the cluster's nodes in equal groups.

    A group has one leaf for each node and as many spines as leaves, and is non-blocking: a leaf forwards all that its
    NICs send, in equal parts to the spines. The global links of a spine together have the bandwidth of its links to
    leaves, so two groups alone use only 1/(groups - 1) of it.

    Raises:
        ValueError: if the nodes do not divide into groups.
    """
    if not 2 <= groups <= cluster.nodes or cluster.nodes % groups:
        raise ValueError(f"found {groups} groups; must divide the {cluster.nodes} nodes, and be two or more")
    inter = cluster.inter_node
    wiring = described(cluster.model_copy(update={"inter_node": inter.model_copy(update={"kind": "fat_tree"})}))
    parts = {name: part for name, part in wiring.parts.items() if part.kind != "switch"}
    links = {ends: each for ends, each in wiring.links.items() if all(end in parts for end in ends)}

    def join(a: str, b: str, bandwidth: float, latency_s: float) -> None:
        links[a, b] = links[b, a] = Link(bandwidth, latency_s, inter.efficiency)

    size = cluster.nodes // groups
    up = inter.nics_per_node * inter.nic_bandwidth_bytes_per_s / size
    for node in range(cluster.nodes):
        leaf, group = f"leaf{node}", node // size
        parts[leaf] = NetworkDevice(leaf, "switch", tier="leaf")
        for nic in range(inter.nics_per_node):
            join(f"nic{node}.{nic}", leaf, inter.nic_bandwidth_bytes_per_s, inter.latency_s / 2)
        for index in range(size):
            spine = f"spine{group}.{index}"
            parts[spine] = NetworkDevice(spine, "switch", tier="spine")
            join(leaf, spine, up, 0.0)
    for index in range(size):
        for a in range(groups):
            for b in range(a + 1, groups):
                join(f"spine{a}.{index}", f"spine{b}.{index}", up * size / (groups - 1), GLOBAL_S)
    return Wiring(parts, links, f"{cluster.name}, dragonfly+", cluster.source)
