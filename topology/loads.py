"""Compute how busy a run keeps each link, from the bytes of its collectives and messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise

from msgspec import Struct

from topology.collective_kinds import KINDS
from topology.graph import wiring_of
from topology.mesh import ring_cycles
from topology.routes import Routes
from topology.spec import ClusterSpec
from topology.torus import torus_position, torus_shape
from topology.wiring import Ends, Wiring


class Traffic(Struct, frozen=True):
    """Describe one communication of a step: its kind, its ranks, its size as nccl-tests counts it, how often."""

    kind: str
    ranks: tuple[int, ...]
    size_bytes: float
    times: int = 1


def link_loads(cluster: ClusterSpec, traffic: Iterable[Traffic], step_time_s: float) -> dict[Ends, float]:
    """Return for each link the part of the step for which it is busy, if it works at full bandwidth.

    Rings are laid as NCCL lays them: one for each member of a domain, each leaving the domain at another member.
    Exchanges go pair by pair, messages from each rank to the next and from the last to the first. In-switch reduction
    is counted as a ring. Ranks that the network does not have are left out. On a torus, rings over all nodes use all
    directions (`_on_all_routers`).
    """
    wiring = wiring_of(cluster)
    routes = Routes(wiring, cluster)
    fabric = [ends for ends in wiring.links if wiring.kind(ends[0]) == wiring.kind(ends[1]) == "switch"]
    carried: dict[Ends, float] = {}
    for each in traffic:
        ranks = tuple(rank for rank in each.ranks if rank < len(wiring.ranks))
        round_torus = _on_all_routers(cluster, each, ranks)
        for src, dst, size in _transfers(cluster, each, ranks):
            loads = routes.passage(src, dst).loads
            if round_torus:
                loads = _spread(loads, fabric, wiring)
            for ends, part in loads.items():
                carried[ends] = carried.get(ends, 0.0) + size * each.times * part
    return {ends: size / wiring.links[ends].usable_bytes_per_s / step_time_s for ends, size in carried.items()}


def _on_all_routers(cluster: ClusterSpec, each: Traffic, ranks: tuple[int, ...]) -> bool:
    """Return whether a collective runs in rings over all nodes of a torus.

    A torus splits into Hamiltonian rings, so these hops load all its links equally.
    """
    rings = not KINDS[each.kind].messages
    whole = len({rank // cluster.gpus_per_node for rank in ranks}) == cluster.nodes
    return cluster.inter_node.is_torus and rings and whole


def _spread(loads: Mapping[Ends, float], fabric: Sequence[Ends], wiring: Wiring) -> dict[Ends, float]:
    """Return a hop's loads; its load between routers is spread over all links between routers by their bandwidth."""
    links = wiring.links
    own = {ends: part for ends, part in loads.items() if not wiring.kind(ends[0]) == wiring.kind(ends[1]) == "switch"}
    if len(own) == len(loads):
        return own
    whole = sum(links[ends].usable_bytes_per_s for ends in fabric)
    return own | {ends: links[ends].usable_bytes_per_s / whole for ends in fabric}


def _transfers(cluster: ClusterSpec, each: Traffic, ranks: tuple[int, ...]) -> list[tuple[int, int, float]]:
    n = len(each.ranks)
    if n < 2:
        return []
    kind = KINDS[each.kind]
    if kind.exchanges:
        return [(a, b, each.size_bytes / n) for a in ranks for b in ranks if a != b]
    if kind.messages:
        first = ranks[:1] if len(ranks) == n else ()
        return [(a, b, each.size_bytes) for a, b in pairwise([*ranks, *first])]
    sent = kind.passes * each.size_bytes * (n - 1) / n
    if cluster.intra_node.meshed:
        return _over_meshes(cluster, ranks, sent)
    if cluster.inter_node.is_torus and cluster.gpus_per_node == 1:
        return [(a, b, sent * part) for a, b, part in _along_axes(cluster, ranks)]
    return ring_transfers(cluster, ranks, sent)


def mesh_transfers(cluster: ClusterSpec, members: Sequence[int]) -> list[tuple[int, int, float]]:
    """Return transfers among `members` of a meshed node, as parts of what each member sends.

    On the cube mesh they go along the cycles that fit on it, in both directions; if every two GPUs are linked, equally
    over all links.
    """
    gpus = cluster.gpus_per_node
    local = tuple(sorted(rank % gpus for rank in members))
    if len(local) == 2 or gpus != 8 or cluster.intra_node.all_linked:
        return [(a, b, 1 / (len(members) - 1)) for a in members for b in members if a != b]
    start = members[0] // gpus * gpus
    cycles = ring_cycles(gpus, local)
    ways = [way for cycle in cycles for way in ((*cycle, cycle[0]), (*cycle[::-1], cycle[-1]))]
    ways = ways or [(*local, local[0])]
    return [(start + a, start + b, 1 / len(ways)) for way in ways for a, b in pairwise(way)]


def _over_meshes(cluster: ClusterSpec, ranks: Sequence[int], sent_bytes: float) -> list[tuple[int, int, float]]:
    """Return the transfers of rings over meshed nodes: inside a node on all links, between nodes as `ring_transfers`.

    Each of a node's g members sends one of the g rings on to the next node.
    """
    domains = _by_domain(cluster, ranks)
    if len(domains) == 1:
        return [(a, b, sent_bytes * part) for a, b, part in mesh_transfers(cluster, ranks)]
    size = cluster.domain_gpus
    between = [each for each in ring_transfers(cluster, ranks, sent_bytes) if each[0] // size != each[1] // size]
    return between + [
        (a, b, sent_bytes * (1 - 1 / len(members)) * part)
        for members in domains
        if len(members) > 1
        for a, b, part in mesh_transfers(cluster, members)
    ]


def _by_domain(cluster: ClusterSpec, ranks: Sequence[int]) -> list[list[int]]:
    return [list(members) for _, members in groupby(ranks, key=lambda rank: rank // cluster.domain_gpus)]


def _along_axes(cluster: ClusterSpec, ranks: Sequence[int]) -> list[tuple[int, int, float]]:
    """Return what each chip of a group sends along the axes of a torus, as parts of all that it sends.

    See `torus.ring_links`. A group that is not a lattice sends around in the order of its ranks.
    """
    shape = torus_shape(cluster.nodes, cluster.inter_node.nics_per_node)
    places = {torus_position(rank, shape): rank for rank in ranks}
    axes = [sorted(set(values)) for values in zip(*places, strict=True)]
    if math.prod(map(len, axes)) != len(places):
        return ring_transfers(cluster, ranks, 1.0)
    # Along a whole side a chip has two links, along a part of a side one; an axis carries data in proportion.
    links = [
        0.0 if len(axis) == 1 else 2.0 if len(axis) == side else 1.0 for axis, side in zip(axes, shape, strict=True)
    ]
    out = []
    for place, rank in places.items():
        for i, axis in enumerate(axes):
            at = axis.index(place[i])
            for step in (1, -1) if len(axis) > 1 else ():
                beside = places[*place[:i], axis[(at + step) % len(axis)], *place[i + 1 :]]
                out.append((rank, beside, links[i] / sum(links) / 2))
    return out


def ring_transfers(cluster: ClusterSpec, ranks: Sequence[int], sent_bytes: float) -> list[tuple[int, int, float]]:
    """Return the transfers of rings in which every rank sends `sent_bytes` in all.

    There are as many rings as the largest domain has members.
    Ring i enters even domains at member i and leaves them at member i-1, and passes odd domains in the opposite order.
    So it stays on its rail between domains, as NCCL's rings do.
    """
    domains = _by_domain(cluster, ranks)
    count = max(map(len, domains), default=0)
    transfers: list[tuple[int, int, float]] = []
    for start in range(count):
        ring: list[int] = []
        for place, members in enumerate(domains):
            turn = start % len(members)
            order = members[turn:] + members[:turn]
            ring += order if place % 2 == 0 else order[::-1]
        transfers += [(a, b, sent_bytes / count) for a, b in pairwise([*ring, ring[0]]) if a != b]
    return transfers
