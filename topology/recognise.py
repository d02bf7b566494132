"""Recognise a cluster's description in a network's parts and links: nodes, NVLink domains, leaves.

For a regular network only the description is kept, because closed forms give the times of its links for any number of
ranks. For another network the description holds the most frequent value of every kind of link, and the network is kept
with it, so that `uneven` can look up each route.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from topology.graph import described
from topology.graph_files import TopologyError, reachable
from topology.presets import GPUS
from topology.protocols import SIMPLE_NVLINK_S
from topology.spec import ClusterSpec, GpuKind, GpuSpec, InterNode, IntraNode
from topology.torus import torus_links, torus_shape
from topology.wiring import Link, Wiring, link_word

if TYPE_CHECKING:
    from _typeshed import SupportsRichComparison

INSIDE = ("gpu", "pcie", "cpu", "nic")
_ROUNDS = 6  # of distinguishing parts by what they are linked to: a NIC's switch is four links from a GPU
_DIGITS = 9
ValueT = TypeVar("ValueT", bound="SupportsRichComparison")


def recognise(wiring: Wiring) -> ClusterSpec:
    """Return the cluster that a network describes.

    Raises:
        TopologyError: if nodes have unequal numbers of GPUs, or ranks do not go through them node by node.
    """
    nodes = _nodes(wiring)
    size = _equal_nodes(wiring, nodes)
    usual, *others = [_gpu_kind(wiring, nodes, name) for name in _gpu_names(wiring)]
    inter = _inter_node(wiring, nodes)
    spec = ClusterSpec(
        name=wiring.name,
        gpu=usual.gpu,
        others=tuple(others),
        gpus_per_node=size,
        nodes=len(wiring.ranks) // size,
        nvlink_domain=max(size, _domain(wiring, size)),
        intra_node=usual.intra_node,
        inter_node=inter,
        source=wiring.source,
    )
    if not others and _signature(described(spec)) == _signature(wiring):
        return spec
    return spec.model_copy(update={"topology": wiring})


def first_nodes(cluster: ClusterSpec, nodes: int) -> ClusterSpec:
    """Return the cluster with only its first nodes; of a network that was read, their parts and all switches."""
    wiring = cluster.topology
    if wiring is None or nodes >= cluster.nodes:
        return cluster.model_copy(update={"nodes": min(nodes, cluster.nodes)})
    home = node_of(wiring)
    parts = {name: part for name, part in wiring.parts.items() if home.get(name, -1) < nodes}
    links = {ends: each for ends, each in wiring.links.items() if ends[0] in parts and ends[1] in parts}
    fewer = Wiring(parts, links, wiring.name, wiring.source, wiring.gpus)
    return cluster.model_copy(update={"nodes": nodes, "topology": fewer})


def _gpu_names(wiring: Wiring) -> list[str]:
    """Return the kinds of GPUs, the most frequent first; ties by the lowest rank."""
    return [name for name, _ in Counter(wiring.parts[each].gpu for each in wiring.ranks).most_common()]


def _gpu_kind(wiring: Wiring, nodes: Sequence[Sequence[str]], name: str) -> GpuKind:
    """Return a kind of GPU with the bandwidth of its links to the host, and its most frequent links within a node."""
    own = [each for each in wiring.ranks if wiring.parts[each].gpu == name]
    around = {part for members in nodes if not set(own).isdisjoint(members) for part in members}
    gpu = GpuSpec.model_validate({**wiring.gpus[name], "name": name}) if name in wiring.gpus else GPUS[name]
    gpu = gpu.model_copy(update={"host_bandwidth_bytes_per_s": _host_bandwidth(wiring, gpu, around)})
    return GpuKind(gpu=gpu, intra_node=_intra_node(wiring, gpu, own))


def _host_bandwidth(wiring: Wiring, gpu: GpuSpec, around: Collection[str]) -> float:
    up = [
        each.bandwidth_bytes_per_s
        for (a, b), each in wiring.links.items()
        if a in around
        and wiring.kind(b) == "cpu"
        and wiring.kind(a) in ("pcie", "gpu")
        and not (wiring.kind(a) == "gpu" and _has(wiring, a, "pcie"))
    ]
    return _usual(up) if up else gpu.host_bandwidth_bytes_per_s


def _has(wiring: Wiring, part: str, kind: str) -> bool:
    return any(wiring.kind(other) == kind for other in wiring.beside[part])


def node_of(wiring: Wiring) -> dict[str, int]:
    """Return for each GPU, NIC, PCIe switch and CPU the number of its node; nodes are ordered by their lowest rank."""
    return {name: i for i, members in enumerate(_nodes(wiring)) for name in members}


def _nodes(wiring: Wiring) -> list[list[str]]:
    """Return the parts that PCIe joins, by node; GPUs without a host belong to the GPUs that NVLink joins them to."""
    place = {name: name for name, part in wiring.parts.items() if part.kind in INSIDE or part.kind == "nvswitch"}

    def top(name: str) -> str:
        while place[name] != name:
            place[name] = place[place[name]]
            name = place[name]
        return name

    hostless = {name for name in wiring.ranks if not any(_has(wiring, name, kind) for kind in ("pcie", "cpu", "nic"))}
    for a, b in wiring.links:
        if a not in place or b not in place:
            continue
        word = link_word(wiring.kind(a), wiring.kind(b))
        if word in ("pcie", "peer") or (word == "nvlink" and len(hostless) == len(wiring.ranks)):
            place[top(a)] = top(b)
    members: dict[str, list[str]] = {}
    for name in place:
        if wiring.kind(name) != "nvswitch":
            members.setdefault(top(name), []).append(name)
    with_gpus = [m for m in members.values() if any(wiring.kind(name) == "gpu" for name in m)]
    return sorted(with_gpus, key=lambda m: min(wiring.parts[x].rank for x in m if wiring.kind(x) == "gpu"))


def _equal_nodes(wiring: Wiring, nodes: Sequence[Sequence[str]]) -> int:
    """Return the number of GPUs of a node."""
    ranks = [sorted(wiring.parts[x].rank for x in m if wiring.kind(x) == "gpu") for m in nodes]
    size = len(ranks[0])
    for number, held in enumerate(ranks):
        if len(held) != size:
            raise TopologyError(
                f"node {number} (with GPU '{wiring.ranks[held[0]]}') and node 0 have {len(held)} and {size} GPUs: "
                "GPUs that PCIe joins form a node, and all nodes must have the same number"
            )
        if held != list(range(number * size, number * size + size)):
            raise TopologyError(
                f"rank {held[0]} shares a node with ranks {', '.join(map(str, held[1:9]))}: ranks must run through "
                f"the nodes one after the other, {size} a node"
            )
    return size


def _domain(wiring: Wiring, size: int) -> int:
    """Return the most GPUs that NVLink joins in one domain, rounded up to whole nodes."""
    seen: set[str] = set()
    most = 1
    for name in wiring.ranks:
        if name in seen:
            continue
        found = reachable(wiring, name, ("gpu", "nvswitch"))
        seen |= found
        held = sorted(wiring.parts[each].rank for each in found if wiring.kind(each) == "gpu")
        if len(held) > size and held != list(range(held[0], held[-1] + 1)):
            raise TopologyError(
                f"NVLink joins ranks {held[0]} to {held[-1]} and leaves out some between: a domain's ranks must "
                "follow each other"
            )
        most = max(most, len(held))
    return -(-most // size) * size


def _intra_node(wiring: Wiring, gpu: GpuSpec, own: Sequence[str]) -> IntraNode:
    """Return the most frequent link of the GPUs `own` into their domains: to NVSwitches, to other GPUs, or to the host.

    If PCIe has no stated latency, a step takes as long as on NVLink, because most of a step is NCCL's own time.
    """
    by_word = {word: _gpu_links(wiring, word, own) for word in ("nvswitch", "gpu", "cpu", "pcie")}
    kind = next((k for k in ("nvswitch", "gpu", "cpu") if by_word[k]), "pcie")
    if kind == "nvswitch":
        each = _together(by_word[kind])
        hubs = {other for each in own for other in wiring.beside[each] if wiring.kind(other) == "nvswitch"}
        said = [part.nvls_efficiency for name, part in wiring.parts.items() if name in hubs]
        nvls = _usual(gpu.chip.nvls_efficiency if x is None else x for x in said)
        return _links_inside("nvswitch", each, 2 * each.latency_s, nvls)
    if kind == "gpu":
        each = _together(by_word[kind])
        peers = _usual(len([x for x in wiring.beside[name] if wiring.kind(x) == "gpu"]) for name in own)
        # A full mesh: 8 GPUs that are all linked, or chips whose library sends directly to every peer.
        full = peers == 7 or gpu.chip.sends_to_all
        return _links_inside("full_mesh" if full else "nvlink_mesh", each, each.latency_s)
    each = _together(by_word[kind])
    return _links_inside("pcie", each, 2 * each.latency_s or SIMPLE_NVLINK_S)


def _links_inside(kind: Any, each: Link, latency_s: float, nvls: float = 0.0) -> IntraNode:
    return IntraNode(
        kind=kind,
        bandwidth_bytes_per_s=each.bandwidth_bytes_per_s,
        latency_s=latency_s,
        efficiency=each.efficiency,
        nvls_efficiency=nvls,
    )


def _gpu_links(wiring: Wiring, kind: str, own: Sequence[str]) -> list[list[Link]]:
    """Return for each GPU of `own` that has any its links to parts of a kind."""
    found = ([each for other, each in wiring.beside[gpu].items() if wiring.kind(other) == kind] for gpu in own)
    return [each for each in found if each]


def _together(links_of_gpus: list[list[Link]]) -> Link:
    """Return the most frequent sum of all links of one GPU."""
    return _usual(
        Link(sum(x.bandwidth_bytes_per_s for x in each), max(x.latency_s for x in each), each[0].efficiency)
        for each in links_of_gpus
    )


def _inter_node(wiring: Wiring, nodes: Sequence[Sequence[str]]) -> InterNode:
    """Return the NICs, and the shape of the network above them: a torus of routers, rails, or a tree."""
    home = {name: i for i, members in enumerate(nodes) for name in members}
    nics = [name for name in home if wiring.kind(name) == "nic"]
    up = {nic: [s for s in wiring.beside[nic] if wiring.kind(s) == "switch"] for nic in nics}
    ports = [wiring.beside[nic][s] for nic, found in up.items() for s in found]
    if not ports:
        return InterNode(nics_per_node=max(1, _usual(_counts(nics, home, len(nodes)))))
    port = _usual(ports)
    per_node = max(1, _usual(_counts(nics, home, len(nodes))))
    below: dict[str, list[str]] = {}
    for nic, found in up.items():
        for switch in found:
            below.setdefault(switch, []).append(nic)
    said = [wiring.parts[nic].rendezvous for nic in nics]
    about: dict[str, Any] = {
        "nics_per_node": per_node,
        "nic_bandwidth_bytes_per_s": port.bandwidth_bytes_per_s,
        "efficiency": port.efficiency,
        "rendezvous": _usual(bool(each) for each in said),
        "transport": _usual(wiring.parts[nic].transport for nic in nics),
        "spread": _usual(wiring.parts[nic].spread for nic in nics),
        "sharp": _usual(wiring.parts[nic].sharp for nic in nics),
        "pat": _stated(wiring.parts[nic].pat for nic in nics),
    }
    hop = _torus_hop(wiring, below, home, len(nodes), per_node)
    if hop is not None:
        return InterNode(kind="torus", latency_s=hop.latency_s, **about)
    rails = _usual(len(held) == len({home[nic] for nic in held}) for held in below.values()) and per_node > 1
    return InterNode(
        kind="rail_optimized" if rails else "fat_tree",
        latency_s=2 * port.latency_s,
        nodes_per_leaf=_usual(len({home[nic] for nic in held}) for held in below.values()),
        oversubscription=_oversubscription(wiring, below),
        **about,
    )


def _counts(nics: Iterable[str], home: Mapping[str, int], nodes: int) -> list[int]:
    held = Counter(home[nic] for nic in nics)
    return [held[node] for node in range(nodes)]


def _torus_hop(
    wiring: Wiring, below: Mapping[str, Sequence[str]], home: Mapping[str, int], nodes: int, nics: int
) -> Link | None:
    """Return the most frequent link between routers, if each node has its own and they form a torus; otherwise None."""
    if nodes == 1 or len(below) != nodes or any(len({home[n] for n in held}) != 1 for held in below.values()):
        return None
    if any(part.kind == "switch" and name not in below for name, part in wiring.parts.items()):
        return None
    at = {switch: home[held[0]] for switch, held in below.items()}
    grid = {pair for a, b in torus_links(torus_shape(nodes, nics)) for pair in ((a, b), (b, a))}
    found = {(at[a], at[b]): each for (a, b), each in wiring.links.items() if a in at and b in at}
    if not found or not grid.issuperset(found) or 2 * len(found) < len(grid):
        return None
    return _usual(found.values())


def _oversubscription(wiring: Wiring, below: Mapping[str, Sequence[str]]) -> float:
    """Return a leaf's bandwidth from below ÷ its bandwidth to above; 1 if nothing is above."""
    found = []
    for leaf, nics in below.items():
        above = sum(x.usable_bytes_per_s for s, x in wiring.beside[leaf].items() if wiring.kind(s) == "switch")
        into = sum(wiring.beside[nic][leaf].usable_bytes_per_s for nic in nics)
        found.append(round(into / above, _DIGITS) if above else 1.0)
    return min(1000.0, max(1.0, _usual(found)))


def _usual(values: Iterable[ValueT]) -> ValueT:
    """Return the most frequent value; of equally frequent ones the largest."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))


def _stated(values: Iterable[bool | None]) -> bool | None:
    """Return the most frequent value of those that are stated; None if none is."""
    stated = [value for value in values if value is not None]
    return _usual(stated) if stated else None


def _signature(wiring: Wiring) -> Counter[tuple[Any, ...]]:
    """Return the network without its parts' names: GPUs are distinguished by rank, other parts by their links."""
    label: dict[str, int] = {
        name: hash((part.kind, part.gpu, part.rank, bool(part.rendezvous))) for name, part in wiring.parts.items()
    }
    values = {
        ends: (float(f"{each.usable_bytes_per_s:.{_DIGITS}g}"), float(f"{each.latency_s:.{_DIGITS}g}"))
        for ends, each in wiring.links.items()
    }
    for _ in range(_ROUNDS):
        label = {
            name: hash((label[name], tuple(sorted(label[other] for other in beside))))
            for name, beside in wiring.beside.items()
        }
    found: Counter[tuple[Any, ...]] = Counter((label[a], label[b], *value) for (a, b), value in values.items())
    found.update((each,) for each in label.values())
    return found
