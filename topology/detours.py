"""What is left between two nodes, or within one, when the link between them is cut: the next best way of the graph.

Closed forms; a test finds the same ways on the graph with the cut edges taken out. Latencies stay those of the link.
"""

from __future__ import annotations

from topology.spec import ClusterSpec
from topology.torus import torus_hops, torus_position, torus_shape


def left_of_cut(cluster: ClusterSpec, a: int, b: int) -> float:
    """The part of the bandwidth between nodes a and b (one twice: within it) that a detour offers; 0 where none exists.

    - Within a node: over PCIe and the host, whose switches the GPUs share. A node without NVLink has nothing else.
    - Between nodes of one NVLink domain: over the GPUs' shares of the NICs.
    - Between neighbours on a torus: round their side, or over a neighbouring row in three hops; each link then carries
      as many hops more of all that send alike.
    - Elsewhere between nodes: none, since GPUs pass nothing on from one NIC to another.

    >>> from topology.presets import CLUSTERS
    >>> h100 = CLUSTERS["dgx-h100"].model_copy(update={"nodes": 2})
    >>> round(left_of_cut(h100, 0, 0), 2), left_of_cut(h100, 0, 1)
    (0.17, 0.0)
    """
    intra, inter, gpus = cluster.intra_node, cluster.inter_node, cluster.gpus_per_node
    if a == b:
        switches = min(gpus, inter.nics_per_node)
        host = cluster.gpu.host_bandwidth_bytes_per_s * switches / gpus
        return 0.0 if intra.kind == "pcie" else min(1.0, host / intra.usable_bytes_per_s)
    if a * gpus // cluster.domain_gpus == b * gpus // cluster.domain_gpus:
        return min(1.0, inter.usable_bytes_per_s * inter.nics_per_node / gpus / intra.usable_bytes_per_s)
    return 1.0 / _detour_hops(cluster, a, b) if joined(cluster, a, b) else 0.0


def joined(cluster: ClusterSpec, a: int, b: int) -> bool:
    """True if the two nodes are neighbours on a torus, so that a link joins them."""
    if cluster.inter_node.kind != "torus":
        return False
    return torus_hops(a, b, torus_shape(cluster.nodes, cluster.inter_node.nics_per_node)) == 1


def _detour_hops(cluster: ClusterSpec, a: int, b: int) -> float:
    """Hops of the shortest path between neighbours without their own link."""
    shape = torus_shape(cluster.nodes, cluster.inter_node.nics_per_node)
    places = zip(torus_position(a, shape), torus_position(b, shape), shape, strict=True)
    side = next(side for x, y, side in places if x != y)
    rows = sum(each > 1 for each in shape) > 1
    around = side - 1 if side > 2 else float("inf")
    return min(around, 3 if rows else float("inf"))
