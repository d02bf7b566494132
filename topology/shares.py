"""Compute what a collective or message puts on the links of each participating GPU, without other traffic.

The closed forms of `network` already divide NICs and the links above leaf switches fairly among GPUs. This module
describes the links of one GPU: into its domain, its share of the NICs, its share above the leaves, its PCIe link, each
in both directions. Two communications of one GPU that overlap on a link slow each other
(`contention.shared_fractions`); alone, each takes its closed form. All members of a group get the load of those that
send most, because they advance together.

Left out: single links of a mesh and single directions of a torus. A GPU's links, or its NICs, are one link here, so two
flows on the same physical link are too fast. A faulty pair of nodes is not a link of its own either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from topology.algorithms import TRAITS, Crossing
from topology.collective_kinds import KINDS
from topology.collectives import Choice
from topology.durations import NetworkPath, duration
from topology.group import Group
from topology.network import Network
from topology.spec import ClusterSpec

LinkKind = Literal["domain", "nic", "spine", "host"]
LINKS: tuple[LinkKind, ...] = get_args(LinkKind)
"""A GPU's links: into its NVLink domain (or PCIe host), its share of the NICs and above the leaves, its PCIe link."""


class Load(NamedTuple):
    """Hold the load of a communication. `flowing`: the part of its seconds in which bytes flow; the rest is latency.

    `bytes`: by link; the same number is sent and received.
    """

    flowing: float
    bytes: Mapping[str, float]


NOTHING = Load(0.0, {})


def capacities(cluster: ClusterSpec) -> dict[str, float]:
    """Return the bytes/s per direction of a GPU's links."""
    inter = cluster.inter_node
    share = inter.usable_bytes_per_s * inter.nics_per_node / cluster.gpus_per_node
    return {
        "domain": cluster.intra_node.usable_bytes_per_s,
        "nic": share,
        "spine": share / inter.oversubscription,
        "host": max(cluster.gpu.host_bandwidth_bytes_per_s, share),
    }


def links_of(network: Network, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the links that a group's collectives may use."""
    group = network.group(ranks)
    near = ("domain",) if group.members_max > 1 else ()
    return (*near, *_far_links(network.cluster)) if group.domains > 1 else near


def links_between(network: Network, src: int, dst: int) -> tuple[str, ...]:
    """Return the links that a message may use."""
    if src // network.regular.domain_gpus == dst // network.regular.domain_gpus:
        return ("domain",)
    far = _far_links(network.cluster)
    return ("domain", *far) if _relayed(network.cluster, src, dst) else far


def _far_links(cluster: ClusterSpec) -> tuple[str, ...]:
    return ("nic", "spine", "host") if _has_spine(cluster) else ("nic", "host")


def _relayed(cluster: ClusterSpec, src: int, dst: int) -> bool:
    """Return whether a message first crosses NVLink to the GPU on the receiver's rail."""
    return cluster.inter_node.has_rails and (src - dst) % cluster.gpus_per_node != 0


def collective_load(
    network: Network, kind: str, ranks: Sequence[int], size_bytes: float, choice: Choice | None = None
) -> Load:
    """Return a collective's load on the links of each member; `size_bytes` as nccl-tests counts it.

    `choice`: the algorithm and protocol of its price; None chooses again, as for a collective whose time was measured.
    """
    if len(ranks) == 1 or size_bytes <= 0:
        return NOTHING
    group = network.group(ranks)
    algorithm, protocol = choice or network.chosen(kind, ranks, size_bytes)
    cost = duration(kind, algorithm, protocol, group, size_bytes)
    traits = TRAITS[algorithm]
    near, far = traits.sent_bytes(kind, group, size_bytes)
    wire = protocol.sent_bytes if protocol else 1.0
    if KINDS[kind].exchanges:
        far *= network.regular.exchange_on_torus(ranks)[1]
    load = _load(0.0, near * wire, far * wire, _crossing(traits.crossing, group))
    carried = capacities(network.cluster)
    flowing_s = max([cost.transfer_s, *(size / carried[each] for each, size in load.bytes.items())])
    return load._replace(flowing=min(1.0, flowing_s / cost.seconds))  # steps and transfer may overlap


def message_load(network: Network, src: int, dst: int, size_bytes: float) -> Load:
    """Return a message's load on the links out of the sender and into the receiver."""
    if src == dst or size_bytes <= 0:
        return NOTHING
    path, relayed, crosses = path_of(network, src, dst)
    flowing = 1.0 - network.send(src, dst, 0.0) / network.send(src, dst, size_bytes)
    if not path.hops:
        return _load(flowing, size_bytes, 0.0, 0.0)
    return _load(flowing, size_bytes if relayed else 0.0, size_bytes * path.hops / path.alone, float(crosses))


def path_of(network: Network, src: int, dst: int) -> tuple[NetworkPath, bool, bool]:
    """Return a message's path, whether it first crosses NVLink, and whether it goes above the leaves.

    Its load depends only on these and its size.
    """
    cluster = network.cluster
    span = cluster.gpus_per_node * cluster.inter_node.nodes_per_leaf
    crosses = _has_spine(cluster) and src // span != dst // span
    return network.path(src, dst), _relayed(cluster, src, dst), crosses


def copy_load(network: Network, size_bytes: float) -> Load:
    """Return the load of a copy between a GPU and its host."""
    seconds = network.host_copy(size_bytes)
    flowing = size_bytes / network.cluster.gpu.host_bandwidth_bytes_per_s / seconds if seconds else 0.0
    return Load(flowing, {"host": size_bytes} if size_bytes else {})


def _load(flowing: float, near: float, far: float, crossing: float) -> Load:
    sent = {"domain": near, "nic": far, "spine": far * crossing, "host": far}
    return Load(flowing, {each: size for each, size in sent.items() if size > 0})


def _has_spine(cluster: ClusterSpec) -> bool:
    """Return whether there is less bandwidth above the leaf switches than below."""
    return cluster.inter_node.oversubscription > 1.0 and not cluster.inter_node.is_torus


def crossings(network: Network, ranks: Sequence[int]) -> tuple[float, ...]:
    """Return the part of the bytes above the leaves for rings, exchanges and all others; loads depend on it."""
    group = network.group(ranks)
    return tuple(_crossing(each, group) for each in get_args(Crossing))


def _crossing(crossing: Crossing, group: Group) -> float:
    """Return the part of a GPU's NIC bytes that goes above the leaves."""
    leaves = group.leaves
    if leaves is None or group.domains == 1:
        return 0.0
    return {"ring": leaves.ring, "exchange": leaves.exchange, "all": 1.0}[crossing]
