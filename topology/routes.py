"""Find the paths of messages on a network's parts and links, as NCCL would choose them.

- Inside a domain: over NVLink, through all NVSwitches that both GPUs are linked to, over a direct link, or through a
  third GPU (PATH_NVB). Without NVLink: over PCIe and the host.
- Otherwise: through the NICs nearest to the GPU, in equal parts. On rails, a message to another local index first goes
  to the GPU on the receiver's rail (PXN).
- Between switches: over all paths with the fewest hops, in proportion to their links' bandwidth (adaptive routing).
- If links are cut: the fastest path that is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from itertools import pairwise

from msgspec import Struct

from topology.recognise import node_of
from topology.spec import ClusterSpec
from topology.wiring import KINDS, Ends, Link, Wiring

_PROBE_BYTES = 1 << 20  # size of the message whose time compares paths over PCIe


class NoWay(ValueError):
    """Report that no path joins two GPUs."""


class Passage(Struct, frozen=True, eq=False):
    """Hold a message's bytes on each link, for each byte sent, and the latency of its longest path.

    A key of dictionaries by identity: messages over the same links share one.
    """

    loads: dict[Ends, float]
    latency_s: float


Branch = tuple[float, tuple[Passage, ...]]
"""A part of a message's bytes, and the sections of its path. Messages over the same section share its object, so that
the loads of many messages can be added section by section."""


def whole(branches: Iterable[Branch]) -> Passage:
    """Return the passage of a message that uses all its branches at the same time."""
    loads, latency_s = dict[Ends, float](), 0.0
    for part, stretches in branches:
        latency_s = max(latency_s, sum(each.latency_s for each in stretches))
        for each in stretches:
            for ends, load in each.loads.items():
                loads[ends] = loads.get(ends, 0.0) + part * load
    return Passage(loads, latency_s)


class Routes:
    """Find and cache the passages between the ranks of a network."""

    def __init__(self, wiring: Wiring, cluster: ClusterSpec) -> None:
        """Prepare the paths of `wiring`; `cluster`: its description, which has the domains and rails."""
        self.wiring, self.cluster = wiring, cluster
        self._node = node_of(wiring)
        self._passages: dict[tuple[int, int], Passage] = {}
        self._between: dict[tuple[str, str], Passage] = {}
        self._along: dict[tuple[str, ...], Passage] = {}
        self._insides: dict[tuple[int, int], Passage | None] = {}
        self._far: dict[str, dict[str, int]] = {}
        self._nearer: dict[tuple[str, str], dict[str, Link]] = {}  # by end and switch, the links that lead nearer to it
        self._switches_of = {name: self._switches_beside(name) for name in wiring.parts}
        self._nics = self._owned()

    def nics(self, rank: int) -> tuple[str, ...]:
        """Return the NICs that a rank sends through."""
        return self._nics[rank]

    def passage(self, src: int, dst: int) -> Passage:
        """Return the passage from one rank to another.

        Raises:
            NoWay: if no path joins them.
        """
        key = src, dst
        if key not in self._passages:
            self._passages[key] = whole(self.branches(src, dst))
        return self._passages[key]

    def branches(self, src: int, dst: int) -> list[Branch]:
        """Return the branches of a message from one rank to another; empty if both are the same.

        Raises:
            NoWay: if no path joins them.
        """
        if src == dst:
            return []
        cluster, size = self.cluster, self.cluster.gpus_per_node
        if src // cluster.domain_gpus == dst // cluster.domain_gpus:
            found = self._inside(src, dst)
            if found is not None:
                return [(1.0, (found,))]
        rails = cluster.inter_node.has_rails and src % size != dst % size
        via = src // size * size + dst % size
        if rails and via not in (src, dst):
            first = self._inside(src, via)
            if first is not None:
                return [(part, (first, *stretches)) for part, stretches in self._through_nics(via, dst)]
        return self._through_nics(src, dst)

    def _inside(self, src: int, dst: int) -> Passage | None:
        """Return the passage over NVLink, or else over PCIe; None if neither joins the ranks."""
        if (src, dst) not in self._insides:
            self._insides[src, dst] = self._found_inside(src, dst)
        return self._insides[src, dst]

    def _found_inside(self, src: int, dst: int) -> Passage | None:
        a, b = self.wiring.ranks[src], self.wiring.ranks[dst]
        beside = self.wiring.beside
        hubs = [each for each in beside[a] if self.wiring.kind(each) == "nvswitch" and b in beside[each]]
        if hubs:
            wide = [min(beside[a][h].usable_bytes_per_s, beside[h][b].usable_bytes_per_s) for h in hubs]
            loads = {ends: w / sum(wide) for h, w in zip(hubs, wide, strict=True) for ends in ((a, h), (h, b))}
            return Passage(loads, max(beside[a][h].latency_s + beside[h][b].latency_s for h in hubs))
        if b in beside[a]:
            return self._on((a, b))
        relays = [x for x in beside[a] if self.wiring.kind(x) == "gpu" and b in beside[x]]
        if relays:
            wide = [min(beside[a][x].usable_bytes_per_s, beside[x][b].usable_bytes_per_s) for x in relays]
            best = [x for x, w in zip(relays, wide, strict=True) if w == max(wide)]
            return self._on((a, best[(src + dst) % len(best)], b))
        if self._node[a] != self._node[b]:
            return self._over(a, b, ("nvswitch",))
        peers = all(any(self.wiring.kind(x) == "cpu" for x in beside[each]) for each in (a, b))
        found = self._over(a, b, ("cpu",)) if peers else None
        return found or self._over(a, b, ("pcie", "cpu")) or self._over(a, b, ("nvswitch",))

    def _on(self, way: tuple[str, ...]) -> Passage:
        """Return the passage along a path, given as its parts in order."""
        found = self._along.get(way)
        if found is None:
            hops = list(pairwise(way))
            latency_s = sum(self.wiring.links[ends].latency_s for ends in hops)
            found = self._along[way] = Passage(dict.fromkeys(hops, 1.0), latency_s)
        return found

    def _over(self, start: str, end: str, kinds: tuple[str, ...]) -> Passage | None:
        """Return the passage of the fastest path over parts of these kinds; None if there is none."""
        way = self._quickest(start, kinds, {end}).get(end)
        return None if way is None else self._on(way)

    def _quickest(self, start: str, kinds: tuple[str, ...], ends: set[str]) -> dict[str, tuple[str, ...]]:
        """Return the fastest paths to `ends` over parts of these kinds."""
        ways: dict[str, tuple[str, ...]] = {}
        queue: list[tuple[float, int, tuple[str, ...]]] = [(0.0, 0, (start,))]
        while queue:
            seconds, _, way = heapq.heappop(queue)
            if way[-1] in ways:
                continue
            ways[way[-1]] = way
            if way[-1] in ends and way[-1] != start:
                continue
            for other, each in self.wiring.beside[way[-1]].items():
                if other not in ways and (other in ends or self.wiring.kind(other) in kinds):
                    cost = each.latency_s + _PROBE_BYTES / each.usable_bytes_per_s
                    heapq.heappush(queue, (seconds + cost, len(way), (*way, other)))
        return {each: ways[each] for each in ends if each in ways}

    def _to_nics(self, name: str, nics: set[str]) -> dict[str, tuple[str, ...]]:
        """Return a GPU's paths to NICs of its node; with a PCIe switch, not through its direct link to the host."""
        beside = self.wiring.beside[name]
        kinds = ("pcie", "cpu")
        if any(self.wiring.kind(x) == "pcie" for x in beside) and any(self.wiring.kind(x) == "cpu" for x in beside):
            first = [x for x in beside if self.wiring.kind(x) in ("pcie", "nic")]
            found: dict[str, tuple[str, ...]] = {}
            for switch in first:
                for nic, way in (
                    {switch: (switch,)} if switch in nics else self._quickest(switch, kinds, nics)
                ).items():
                    if nic not in found or len(way) + 1 < len(found[nic]):
                        found[nic] = (name, *way)
            return found
        return self._quickest(name, kinds, nics)

    def _owned(self) -> list[tuple[str, ...]]:
        """Return the NICs of each rank: the nearest by PCIe, divided equally among GPUs with the same nearest NICs."""
        wiring, per_node = self.wiring, self.cluster.gpus_per_node
        usable: dict[int, set[str]] = {}
        for name, node in self._node.items():
            if wiring.kind(name) == "nic" and any(wiring.kind(x) in ("switch", "nic") for x in wiring.beside[name]):
                usable.setdefault(node, set()).add(name)
        order = {name: i for i, name in enumerate(wiring.parts)}
        self._pcie_ways: dict[tuple[str, str], tuple[str, ...]] = {}
        out: list[tuple[str, ...]] = []
        for start in range(0, len(wiring.ranks), per_node):
            near: dict[tuple[str, ...], list[int]] = {}
            for rank in range(start, start + per_node):
                name = wiring.ranks[rank]
                ways = self._to_nics(name, usable.get(self._node[name], set()))
                self._pcie_ways.update({(name, nic): way for nic, way in ways.items()})
                least = min(map(len, ways.values()), default=0)
                nearest = [nic for nic, way in ways.items() if len(way) == least]
                near.setdefault(tuple(sorted(nearest, key=order.__getitem__)), []).append(rank)
            of_rank: dict[int, tuple[str, ...]] = {}
            for nics, ranks in near.items():
                for i, rank in enumerate(ranks):
                    of_rank[rank] = _part(nics, i, len(ranks))
            out += [of_rank[rank] for rank in range(start, start + per_node)]
        return out

    def _through_nics(self, src: int, dst: int) -> list[Branch]:
        ours, theirs = self._nics[src], self._nics[dst]
        start, end = self.wiring.ranks[src], self.wiring.ranks[dst]
        count = max(len(ours), len(theirs)) if ours and theirs else 0
        found = []
        for i in range(count):
            nic, other = ours[i % len(ours)], theirs[i % len(theirs)]
            between = self._nic_to_nic(nic, other)
            if between is not None:
                back = self._pcie_ways[end, other][::-1]
                found.append((self._on(self._pcie_ways[start, nic]), *between, self._on(back)))
        if not found:  # the GPU's own links are cut: use any other path, through other GPUs or their NICs
            detour = self._over(start, end, KINDS)
            if detour is None:
                raise NoWay(f"no way leads from rank {src} to rank {dst}: neither NVLink, PCIe nor NICs join them")
            return [(1.0, (detour,))]
        return [(1 / len(found), each) for each in found]

    def _nic_to_nic(self, nic: str, other: str) -> tuple[Passage, ...] | None:
        """Return the sections between two NICs, over all paths with the fewest switches; None if there is none."""
        if other in self.wiring.beside[nic]:
            return (self._on((nic, other)),)
        if nic == other:
            return ()
        ways = [
            (hops, start, end)
            for end in self._switches_of[other]
            for hops, start in ((self._hops(end).get(start), start) for start in self._switches_of[nic])
            if hops is not None
        ]
        if not ways:
            return None
        _, start, end = min(ways)
        return self._on((nic, start)), self._switches(start, end), self._on((end, other))

    def _switches_beside(self, name: str) -> list[str]:
        return [other for other in self.wiring.beside[name] if self.wiring.kind(other) == "switch"]

    def _hops(self, end: str) -> Mapping[str, int]:
        """Return the number of hops to a switch from every other switch."""
        if end not in self._far:
            seen, line = {end: 0}, [end]
            for name in line:
                for other in self._switches_of[name]:
                    if other not in seen:
                        seen[other] = seen[name] + 1
                        line.append(other)
            self._far[end] = seen
        return self._far[end]

    def _nearer_to(self, end: str, name: str) -> dict[str, Link]:
        """Return the links of the switch `name` that lead nearer to `end`."""
        found = self._nearer.get((end, name))
        if found is None:
            hops, links = self._hops(end), self.wiring.links
            near = [other for other in self._switches_of[name] if hops[other] == hops[name] - 1]
            found = self._nearer[end, name] = {other: links[name, other] for other in near}
        return found

    def _switches(self, start: str, end: str) -> Passage:
        if (start, end) not in self._between:
            hops = self._hops(end)
            part, latency, loads = {start: 1.0}, {start: 0.0}, {}
            for left in range(hops[start], 0, -1):
                for name in [each for each in part if hops[each] == left]:
                    on = self._nearer_to(end, name)
                    wide = sum(each.usable_bytes_per_s for each in on.values())
                    for other, each in on.items():
                        load = part[name] * each.usable_bytes_per_s / wide
                        loads[name, other] = load
                        part[other] = part.get(other, 0.0) + load
                        latency[other] = max(latency.get(other, 0.0), latency[name] + each.latency_s)
            self._between[start, end] = Passage(loads, latency[end])
        return self._between[start, end]


def _part(nics: tuple[str, ...], index: int, owners: int) -> tuple[str, ...]:
    """Return the NICs of one of several owners: some of its own, one shared with others, or all shared by all.

    >>> _part(("a", "b", "c", "d"), 1, 2), _part(("a", "b"), 3, 4), _part(("a", "b", "c"), 0, 2)
    (('c', 'd'), ('b',), ('a', 'b', 'c'))
    """
    if len(nics) % owners == 0:
        each = len(nics) // owners
        return nics[index * each : (index + 1) * each]
    if owners % len(nics or "x") == 0:
        return (nics[index * len(nics) // owners],) if nics else ()
    return nics
