"""Join several kinds of nodes under one spine; the nodes of each kind follow those of the previous kind."""

from __future__ import annotations

from collections.abc import Sequence

from topology.graph import described
from topology.graph_files import TopologyError, check
from topology.presets import GPUS
from topology.recognise import node_of
from topology.spec import ClusterSpec
from topology.wiring import Ends, Link, NetworkDevice, Wiring

SPINE = "spine"


def mixed(clusters: Sequence[ClusterSpec]) -> Wiring:
    """Return the network of all nodes of several clusters, with ranks in the order of the clusters.

    Each kind of node has its own leaves, with the bandwidth of its NICs and its oversubscription; all share one spine.
    The network contains the descriptions of GPUs that are not presets.

    Raises:
        TopologyError: for nodes of unequal size, a torus, two GPUs of one name, or if no spine joins the nodes.
    """
    parts: dict[str, NetworkDevice] = {}
    links: dict[Ends, Link] = {}
    gpus = {}
    total, start = sum(each.nodes for each in clusters), 0
    for number, each in enumerate(clusters):
        _check(each, clusters)
        whole = described(each.model_copy(update={"nodes": total, "topology": None}))
        own = _own_names(whole, range(start, start + each.nodes), f"{number}." if number else "")
        parts |= {name: whole.parts[old]._replace(name=name) for old, name in own.items()}
        links |= {(own[a], own[b]): link for (a, b), link in whole.links.items() if a in own and b in own}
        if GPUS.get(each.gpu.name) != each.gpu:
            gpus[each.gpu.name] = each.gpu.model_dump(mode="json", exclude_none=True)
        start += each.nodes
    name = " and ".join(dict.fromkeys(each.name for each in clusters))
    wiring = Wiring(parts, links, name, "; ".join(dict.fromkeys(each.source for each in clusters if each.source)), gpus)
    check(wiring)
    return wiring


def _check(cluster: ClusterSpec, clusters: Sequence[ClusterSpec]) -> None:
    first = clusters[0]
    if cluster.gpus_per_node != first.gpus_per_node:
        raise TopologyError(
            f"nodes of {first.name} and of {cluster.name} have {first.gpus_per_node} and {cluster.gpus_per_node} GPUs; "
            "all nodes must have the same number"
        )
    if cluster.inter_node.is_torus:
        raise TopologyError(f"{cluster.name}: a torus joins equal nodes only")
    for other in clusters:
        if other.gpu.name == cluster.gpu.name and other.gpu != cluster.gpu:
            raise TopologyError(f"two GPUs that differ are both called {cluster.gpu.name}; give one another name")


def _own_names(wiring: Wiring, nodes: range, prefix: str) -> dict[str, str]:
    """Return the new names of some nodes' parts, of the switches that these are linked to, and of the spine."""
    home = node_of(wiring)
    own = {name: name for name, node in home.items() if node in nodes}
    switches = [name for name, part in wiring.parts.items() if part.kind in ("nvswitch", "switch")]
    held = {name: prefix + name for name in switches if any(other in own for other in wiring.beside[name])}
    return own | held | ({SPINE: SPINE} if SPINE in wiring.parts else {})
