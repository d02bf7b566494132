"""What a collective or a message puts on the links of each GPU that takes part, while nothing else is on them.

The closed forms of `network` give every GPU its fair share of what lies above it: of its node's NICs, of what is left
above the leaf switches. That is what sharing between GPUs costs. What is left to share is a GPU's own: its way into the
domain, its share of the NICs, its share above the leaves, its PCIe link, each in both directions. Two communications
of one GPU that overlap there are slowed by each other (`contention.shared_fractions`); alone, each takes its closed
form. Members of a group lie unlike in it; all are given the load of those that send most, since all go in step.

Left out: single links of a mesh and single directions of a torus (a GPU's links, or its NICs, are one link here, so two
flows that happen to choose the same one get more than they would); a fault's pair of nodes is no link of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from topology.collectives import Choice, Group
from topology.durations import Way, duration
from topology.network import Network
from topology.spec import ClusterSpec

LINKS = ("domain", "nic", "spine", "host")
"""A GPU's links: into its NVLink domain (or PCIe host), its share of the NICs and above the leaves, its PCIe link."""


class Load(NamedTuple):
    """`flowing`: the part of the seconds in which bytes flow, the rest being starts and steps. `bytes` by link, sent
    and received alike."""

    flowing: float
    bytes: Mapping[str, float]


NOTHING = Load(0.0, {})
_WIRE = {"LL": 2.0, "LL128": 128 / 120}  # bytes sent for a byte of data: a flag beside each word, or each line


def capacities(cluster: ClusterSpec) -> dict[str, float]:
    """Bytes/s and direction of a GPU's links."""
    inter = cluster.inter_node
    share = inter.usable_bytes_per_s * inter.nics_per_node / cluster.gpus_per_node
    return {
        "domain": cluster.intra_node.usable_bytes_per_s,
        "nic": share,
        "spine": share / inter.oversubscription,
        "host": max(cluster.gpu.host_bandwidth_bytes_per_s, share),
    }


def links_of(network: Network, ranks: Sequence[int]) -> tuple[str, ...]:
    """The links that a group's collectives may use."""
    group = network.group(ranks)
    near = ("domain",) if group.members_max > 1 else ()
    return (*near, *_far_links(network.cluster)) if group.domains > 1 else near


def links_between(network: Network, src: int, dst: int) -> tuple[str, ...]:
    """The links that a message may use."""
    if src // network.regular.domain_gpus == dst // network.regular.domain_gpus:
        return ("domain",)
    far = _far_links(network.cluster)
    return ("domain", *far) if _relayed(network.cluster, src, dst) else far


def _far_links(cluster: ClusterSpec) -> tuple[str, ...]:
    return ("nic", "spine", "host") if _has_spine(cluster) else ("nic", "host")


def _relayed(cluster: ClusterSpec, src: int, dst: int) -> bool:
    """True if a message first crosses NVLink to the GPU on the receiver's rail."""
    return cluster.inter_node.kind == "rail_optimized" and (src - dst) % cluster.gpus_per_node != 0


def collective_load(
    network: Network, kind: str, ranks: Sequence[int], size_bytes: float, choice: Choice | None = None
) -> Load:
    """A collective's bytes on the links of each member; `size_bytes` as nccl-tests counts it. `choice` is what its
    price was made with; None asks the network again, as for a collective whose price was measured."""
    if len(ranks) == 1 or size_bytes <= 0:
        return NOTHING
    group = network.group(ranks)
    algorithm, protocol = choice or network.chosen(kind, ranks, size_bytes)
    cost = duration(kind, algorithm, protocol, group, size_bytes)
    near, far = _sent_bytes(kind, algorithm, group, size_bytes)
    wire = _WIRE.get(protocol, 1.0)
    if algorithm == "pairwise" or kind in ("gather", "scatter"):
        far *= network.regular.exchange_on_torus(ranks)[1]
    load = _load(0.0, near * wire, far * wire, _crossing(network.cluster, algorithm, ranks, group))
    carried = capacities(network.cluster)
    flowing_s = max([cost.transfer_s, *(size / carried[each] for each, size in load.bytes.items())])
    return load._replace(flowing=min(1.0, flowing_s / cost.seconds))  # some steps hold bytes back that flow meanwhile


def message_load(network: Network, src: int, dst: int, size_bytes: float) -> Load:
    """A message's bytes on the sender's links, out, and on the receiver's, in."""
    if src == dst or size_bytes <= 0:
        return NOTHING
    way, relayed, crosses = way_of(network, src, dst)
    flowing = 1.0 - network.send(src, dst, 0.0) / network.send(src, dst, size_bytes)
    if not way.hops:
        return _load(flowing, size_bytes, 0.0, 0.0)
    return _load(flowing, size_bytes if relayed else 0.0, size_bytes * way.hops / way.alone, float(crosses))


def way_of(network: Network, src: int, dst: int) -> tuple[Way, bool, bool]:
    """All that a message's load depends on besides its size: its way, and whether it first crosses NVLink, and whether
    it goes above the leaves."""
    cluster = network.cluster
    span = cluster.gpus_per_node * cluster.inter_node.nodes_per_leaf
    crosses = _has_spine(cluster) and src // span != dst // span
    return network.way(src, dst), _relayed(cluster, src, dst), crosses


def copy_load(network: Network, size_bytes: float) -> Load:
    """A copy between a GPU and its host."""
    seconds = network.host_copy(size_bytes)
    flowing = size_bytes / network.cluster.gpu.host_bandwidth_bytes_per_s / seconds if seconds else 0.0
    return Load(flowing, {"host": size_bytes} if size_bytes else {})


def _load(flowing: float, near: float, far: float, crossing: float) -> Load:
    sent = {"domain": near, "nic": far, "spine": far * crossing, "host": far}
    return Load(flowing, {each: size for each, size in sent.items() if size > 0})


def _sent_bytes(kind: str, algorithm: str, group: Group, size_bytes: float) -> tuple[float, float]:
    """The bytes that a member sends inside its domain, and through its share of the NICs; see `collectives`."""
    n, near, far = group.ranks, group.members_max, group.members
    across = group.domains > 1
    if algorithm == "nvls":
        return size_bytes * (1 + 1 / n if kind == "all_reduce" else (n - 1) / n), 0.0
    if algorithm == "nvls_tree":
        return size_bytes * (1 + 1 / far), size_bytes * (1 if group.domains == 2 else 2) / far
    if algorithm == "tree":
        between = size_bytes * (1 if group.domains == 2 else 2) / far if across else 0.0
        return 2 * size_bytes if near > 1 else 0.0, between
    if algorithm == "pairwise" or kind in ("gather", "scatter"):
        return (near - 1) * size_bytes / n, (n - far) * size_bytes / n if across else 0.0
    if kind == "send_recv":
        return size_bytes if near > 1 else 0.0, size_bytes / max(1.0, far / group.nics) if across else 0.0
    passes = {"all_reduce": 2 * (n - 1) / n, "all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n}
    sent = size_bytes * passes.get(kind, 1.0)
    return (sent * (near - 1) / near, sent / far) if across else (sent, 0.0)


def _has_spine(cluster: ClusterSpec) -> bool:
    """True if there is less bandwidth above the leaf switches than below."""
    return cluster.inter_node.oversubscription > 1.0 and cluster.inter_node.kind != "torus"


def crossings(network: Network, ranks: Sequence[int]) -> tuple[float, ...]:
    """All that loads depend on besides the group: the part above the leaves of rings, exchanges and all others."""
    group = network.group(ranks)
    return tuple(_crossing(network.cluster, each, ranks, group) for each in ("ring", "pairwise", "tree"))


def _crossing(cluster: ClusterSpec, algorithm: str, ranks: Sequence[int], group: Group) -> float:
    """The part of a GPU's bytes on NICs that goes above the leaves, as `Network` counts it: of a ring's domains under
    one leaf only the last sends there; of an exchange what leaves the leaf; all of trees and shifts."""
    if not _has_spine(cluster) or group.domains == 1:
        return 0.0
    placed = np.asarray(ranks)
    span = cluster.gpus_per_node * cluster.inter_node.nodes_per_leaf
    leaves, per_leaf = np.unique(placed // span, return_counts=True)
    if len(leaves) == 1:
        return 0.0
    if algorithm == "ring":
        under = np.unique(np.stack([placed // span, placed // cluster.domain_gpus]), axis=1)[0]
        return 1.0 / int(np.unique(under, return_counts=True)[1].min())
    if algorithm == "pairwise":
        return min(1.0, (group.ranks - int(per_leaf.min())) / (group.ranks - group.members))
    return 1.0
