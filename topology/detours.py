"""Compute the bandwidth that is left between two nodes, or within one, when their link is cut.

These are closed forms; a test finds the same detours on the graph without the cut edges. Latencies do not change.
"""

from __future__ import annotations

from topology.spec import ClusterSpec
from topology.torus import torus_hops, torus_position, torus_shape


def left_of_cut(cluster: ClusterSpec, a: int, b: int) -> float:
    """Return the part of the bandwidth between nodes a and b that a detour offers; 0 if there is none.

    a = b means the links within the node.

    - Within a node: over PCIe and the host, whose switches the GPUs share; 0 on a node without NVLink.
    - Between nodes of one NVLink domain: over the GPUs' shares of the NICs.
    - Between neighbours on a torus: around their ring, or in three hops over a neighbouring row. All nodes are taken to
      send this way, so each link carries that many times the bytes.
    - Elsewhere between nodes: none, because GPUs do not forward data from one NIC to another.

    >>> from topology.presets import CLUSTERS
    >>> h100 = CLUSTERS["dgx-h100"].model_copy(update={"nodes": 2})
    >>> round(left_of_cut(h100, 0, 0), 2), left_of_cut(h100, 0, 1)
    (0.17, 0.0)
    """
    intra, inter, gpus = cluster.intra_node, cluster.inter_node, cluster.gpus_per_node
    if a == b:
        switches = min(gpus, inter.nics_per_node)
        host = cluster.gpu.host_bandwidth_bytes_per_s * switches / gpus
        return 0.0 if intra.through_host else min(1.0, host / intra.usable_bytes_per_s)
    if a * gpus // cluster.domain_gpus == b * gpus // cluster.domain_gpus:
        return min(1.0, inter.usable_bytes_per_s * inter.nics_per_node / gpus / intra.usable_bytes_per_s)
    return 1.0 / _detour_hops(cluster, a, b) if joined(cluster, a, b) else 0.0


def joined(cluster: ClusterSpec, a: int, b: int) -> bool:
    """Return whether a link of a torus joins the two nodes."""
    if not cluster.inter_node.is_torus:
        return False
    return torus_hops(a, b, torus_shape(cluster.nodes, cluster.inter_node.nics_per_node)) == 1


def _detour_hops(cluster: ClusterSpec, a: int, b: int) -> float:
    """Return the hops of the shortest path between neighbours without their own link."""
    shape = torus_shape(cluster.nodes, cluster.inter_node.nics_per_node)
    places = zip(torus_position(a, shape), torus_position(b, shape), shape, strict=True)
    side = next(side for x, y, side in places if x != y)
    rows = sum(each > 1 for each in shape) > 1
    around = side - 1 if side > 2 else float("inf")
    return min(around, 3 if rows else float("inf"))
