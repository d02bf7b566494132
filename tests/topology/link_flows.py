"""Transfers of a collective laid on the graph's links: an account of its own, for closed forms to meet."""

from collections.abc import Sequence
from itertools import pairwise

from tests.topology.max_min import transfer_seconds
from topology.graph import build_graph, gpu, link, wiring_of
from topology.mesh import ring_cycles
from topology.presets import CLUSTERS
from topology.routes import Passage, Routes
from topology.spec import ClusterSpec
from topology.wiring import Wiring

Transfer = tuple[int, int, float]


def cluster(name: str, nodes: int, **inter_node: object) -> ClusterSpec:
    """Return a shipped machine without the bandwidth of its host's memory, which a graph of links does not say."""
    preset = CLUSTERS[name]
    inter = preset.inter_node.model_copy(update=inter_node)
    changes = {"nodes": nodes, "inter_node": inter, "host_memory_bandwidth_bytes_per_s": None}
    return preset.model_copy(update=changes)


def seconds_per_byte(way: Passage, wiring: Wiring) -> float:
    """Of a message without other traffic: its most loaded link decides."""
    return max((load / wiring.links[ends].usable_bytes_per_s for ends, load in way.loads.items()), default=0.0)


class Links:
    """A cluster's graph, with the links of transfers between ranks."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.graph = build_graph(spec)
        self.capacity = {(a, b): link(self.graph, a, b).usable_bytes_per_s for a, b in self.graph.edges}
        self.routes = Routes(wiring_of(spec), spec)

    def route(self, src: int, dst: int) -> Passage:
        return self.routes.passage(src, dst)

    def alone_s(self, src: int, dst: int, size: float) -> float:
        """What a lone message takes, protocols left out."""
        way = self.route(src, dst)
        return way.latency_s + size * seconds_per_byte(way, self.routes.wiring)

    def seconds(self, transfers: Sequence[Transfer]) -> float:
        """When the last of the transfers ends that start together, latency left out."""
        flows = [tuple(self.route(src, dst).loads) for src, dst, _ in transfers]
        return max(transfer_seconds(flows, [size for _, _, size in transfers], self.capacity))


def mesh_ring_seconds(links: Links, members: tuple[int, ...], sent_bytes: float) -> float:
    """Rings along the mesh's disjoint cycles, each in both directions."""
    cycles = ring_cycles(8, members)
    rings = [cycle for one in cycles for cycle in (one, one[::-1])]
    flows = [[(gpu(a), gpu(b))] for ring in rings for a, b in pairwise([*ring, ring[0]])]
    return max(transfer_seconds(flows, [sent_bytes / len(rings)] * len(flows), links.capacity))


def exchange_transfers(ranks: Sequence[int], size_bytes: float) -> list[Transfer]:
    """An all-to-all: every rank sends its n-th to each other."""
    return [(a, b, size_bytes / len(ranks)) for a in ranks for b in ranks if a != b]
