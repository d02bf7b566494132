"""The way a message takes between two ranks, its narrowest link and its latency."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from topology.graph import Link, gpu, link
from topology.mesh import relay
from topology.spec import ClusterSpec

if TYPE_CHECKING:
    from topology.graph import Graph

_PROBE_BYTES = 1 << 20  # a message of this size is timed to compare ways: large enough to avoid slow links


@dataclass(frozen=True, slots=True)
class Route:
    """Names of the nodes passed, first to last, and the links between them."""

    nodes: tuple[str, ...]
    links: tuple[Link, ...]

    @property
    def hops(self) -> tuple[tuple[str, str], ...]:
        """The directed edges passed."""
        return tuple(pairwise(self.nodes))

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """That of the narrowest link; what a lone message gets."""
        return min((each.bandwidth_bytes_per_s for each in self.links), default=float("inf"))

    @property
    def latency_s(self) -> float:
        return sum(each.latency_s for each in self.links)


def route(graph: Graph, cluster: ClusterSpec, src: int, dst: int) -> Route:
    """The quickest way between two ranks, over the GPUs that NCCL would pass.

    Passed GPUs: on a mesh the relay between GPUs without a link (PATH_NVB); on rails, for a message to
    another local index, the GPU of the sender's node that shares a rail with the receiver (PXN). Between them
    the shortest path by the seconds of a 1 MiB message. Raises `ValueError` for a rank that the graph lacks.
    """
    for rank in (src, dst):
        if gpu(rank) not in graph:
            raise ValueError(f"rank {rank} is not in the graph of {cluster.nodes} nodes")
    names = [gpu(src)]
    stops = _stops(cluster, src, dst)
    for start, end in pairwise(stops):
        inside = start // cluster.domain_gpus == end // cluster.domain_gpus
        names += _path(graph, gpu(start), gpu(end), inside)[1:]
    return Route(tuple(names), tuple(link(graph, a, b) for a, b in pairwise(names)))


def _stops(cluster: ClusterSpec, src: int, dst: int) -> tuple[int, ...]:
    gpus = cluster.gpus_per_node
    node = src // gpus * gpus
    if src == dst:
        return (src,)
    if src // cluster.domain_gpus == dst // cluster.domain_gpus:
        if cluster.intra_node.kind != "nvlink_mesh":
            return (src, dst)
        return tuple(node + index for index in relay(gpus, src - node, dst % gpus))
    if cluster.inter_node.kind == "rail_optimized" and src % gpus != dst % gpus:
        return (src, node + dst % gpus, dst)
    return (src, dst)


def _path(graph: Graph, src: str, dst: str, inside: bool) -> list[str]:
    """Shortest path; GPUs only at its ends, for a GPU forwards nothing unless `_stops` says so.

    `inside` a domain only its own links count: NVLink, or what stands for the host's peer-to-peer transfers.
    """
    import networkx as nx

    def seconds(a: str, b: str, attributes: dict[str, Link]) -> float | None:
        each = attributes["link"]
        if (b != dst and graph.nodes[b]["kind"] == "gpu") or inside != (each.kind in ("nvlink", "peer")):
            return None
        return each.latency_s + _PROBE_BYTES / each.bandwidth_bytes_per_s

    return list(nx.dijkstra_path(graph, src, dst, weight=seconds))
