"""Compare a network that was read with its regular description: slower links, longer paths, a narrow spine.

The transfers of a collective, together with the same collective of all other groups, are put on the routes of both
networks. The ratio of the two times on the most loaded link scales the closed form's bandwidth. It is computed once for
groups of the same layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

from msgspec.structs import replace

from topology.durations import NetworkPath
from topology.graph import described
from topology.group import Group
from topology.loads import mesh_transfers, ring_transfers
from topology.routes import Passage, Routes
from topology.spec import ClusterSpec
from topology.wiring import Ends

Transfers = Sequence[tuple[int, int, float]]
MAX_PEERS = 64  # of an exchange; with more, this many evenly chosen peers represent all
_DIGITS = 12  # of a ratio; further digits are rounding errors


class _Side:
    """Hold the routes of one of the two networks, and the bytes that classes of groups put on its links."""

    def __init__(self, routes: Routes) -> None:
        self.routes = routes
        self._loads: dict[tuple[str, bool, tuple[int, ...]], dict[Ends, float]] = {}

    def loads(
        self, key: tuple[str, bool, tuple[int, ...]], classes: Callable[[], Iterator[Transfers]]
    ) -> dict[Ends, float]:
        """Return the bytes that all groups of a class put on each link."""
        if key not in self._loads:
            self._loads[key], _ = self._summed(each for transfers in classes() for each in transfers)
        return self._loads[key]

    def _summed(self, transfers: Iterable[tuple[int, int, float]]) -> tuple[dict[Ends, float], float]:
        """Return the bytes on each link, and the longest latency; bytes are first added by section, for speed."""
        latency_s = 0.0
        sizes: dict[Passage, float] = {}
        branches = self.routes.branches
        for src, dst, size in transfers:
            for part, passed in branches(src, dst):
                took_s = 0.0
                for each in passed:
                    took_s += each.latency_s
                    sizes[each] = sizes.get(each, 0.0) + size * part
                latency_s = max(latency_s, took_s)
        out: dict[Ends, float] = {}
        for each, size in sizes.items():
            for ends, load in each.loads.items():
                out[ends] = out.get(ends, 0.0) + size * load
        return out, latency_s

    def seconds(self, own: Transfers, loads: dict[Ends, float]) -> tuple[float, float]:
        """Return the seconds of the most loaded link on a group's own paths, and the latency of the longest path."""
        mine, latency_s = self._summed(own)
        links = self.routes.wiring.links
        fullest = (max(load, loads.get(e, 0.0)) / links[e].usable_bytes_per_s for e, load in mine.items())
        return max(fullest, default=0.0), latency_s


class Uneven:
    """Compute the ratios between a network that was read and its description."""

    def __init__(self, cluster: ClusterSpec) -> None:
        assert cluster.topology is not None
        self.cluster = cluster
        self.regular = cluster.model_copy(update={"topology": None})
        self._here = _Side(Routes(cluster.topology, self.regular))
        self._ways: dict[tuple[int, int], tuple[float, float]] = {}
        self._lefts: dict[tuple[str, bool, tuple[int, ...]], tuple[float, float]] = {}

    @cached_property
    def _usual(self) -> _Side:
        return _Side(Routes(described(self.regular), self.regular))

    def group(self, group: Group, ranks: Sequence[int]) -> Group:
        """Return the group with bandwidths and latencies scaled by its routes' ratios."""
        ring_near, step_near = self._left("ring", ranks, True)
        ring_far, step_far = self._left("ring", ranks, False)
        all_near, _ = self._left("exchange", ranks, True)
        all_far, _ = self._left("exchange", ranks, False)
        pair_near, _ = self._left("pair", ranks, True)
        pair_far, _ = self._left("pair", ranks, False)
        return replace(
            group,
            ring_bytes_per_s=group.ring_bytes_per_s * ring_near,
            chain_bytes_per_s=group.chain_bytes_per_s * ring_near,
            exchange_bytes_per_s=group.exchange_bytes_per_s * all_near,
            pair_bytes_per_s=group.pair_bytes_per_s * pair_near,
            latency_s=group.latency_s * step_near,
            inter_ring_bytes_per_s=group.inter_ring_bytes_per_s * ring_far,
            inter_tree_bytes_per_s=group.inter_tree_bytes_per_s * ring_far,
            inter_exchange_bytes_per_s=group.inter_exchange_bytes_per_s * all_far,
            inter_pair_bytes_per_s=group.inter_pair_bytes_per_s * pair_far,
            inter_latency_s=group.inter_latency_s * step_far,
        )

    def path(self, path: NetworkPath, src: int, dst: int) -> NetworkPath:
        """Return a message's latency and bandwidth, scaled by its route's ratios."""
        if (src, dst) not in self._ways:
            own = [(src, dst, 1.0)]
            shift = dst - src

            def all_alike() -> Iterator[Transfers]:
                ranks = len(self._here.routes.wiring.ranks)
                yield [(r, r + shift, 1.0) for r in range(max(0, -shift), min(ranks, ranks - shift))]

            key = ("shift", True, (shift,))
            self._ways[src, dst] = self._compared(key, own, all_alike)
        left, step = self._ways[src, dst]
        return replace(
            path,
            latency_s=path.latency_s * step,
            inter_latency_s=path.inter_latency_s * step,
            bytes_per_s=path.bytes_per_s * left,
        )

    def of_rank(self, rank: int) -> dict[str, float]:
        """Return the part left of a GPU's own links, by the names of `shares.LINKS`."""
        here, usual = (_own_links(side.routes, rank) for side in (self._here, self._usual))
        return {name: _rounded(here[name] / most) if most and here[name] else 1.0 for name, most in usual.items()}

    def _left(self, pattern: str, ranks: Sequence[int], near: bool) -> tuple[float, float]:
        key = pattern, near, tuple(ranks)
        if key not in self._lefts:
            self._lefts[key] = self._found_left(pattern, ranks, near)
        return self._lefts[key]

    def _found_left(self, pattern: str, ranks: Sequence[int], near: bool) -> tuple[float, float]:
        own = self._transfers(pattern, ranks, near)
        if not own:
            return 1.0, 1.0
        first = min(ranks)
        shape = tuple([rank - first for rank in ranks])

        def all_alike() -> Iterator[Transfers]:
            for members in _side_by_side(shape, len(self._here.routes.wiring.ranks)):
                yield self._transfers(pattern, members, near)

        return self._compared((pattern, near, shape), own, all_alike)

    def _compared(
        self, key: tuple[str, bool, tuple[int, ...]], own: Transfers, all_alike: Callable[[], Iterator[Transfers]]
    ) -> tuple[float, float]:
        """Return the part of the bandwidth that is left, and the ratio of the steps' latencies."""
        (usual_s, usual_step_s), (here_s, here_step_s) = (
            side.seconds(own, side.loads(key, all_alike)) for side in (self._usual, self._here)
        )
        left = _rounded(usual_s / here_s) if here_s else 1.0
        return left, _rounded(here_step_s / usual_step_s) if usual_step_s and here_step_s else 1.0

    def _transfers(self, pattern: str, ranks: Sequence[int], near: bool) -> Transfers:
        """Return sender, receiver and bytes of each transfer, inside domains (`near`) or between them."""
        domain = self.cluster.domain_gpus
        found = _PATTERNS[pattern](self.regular, ranks, near)
        return [each for each in found if (each[0] // domain == each[1] // domain) == near]


_LAST: list[Uneven] = []  # of the last few clusters, because a step creates several networks of one cluster
_KEPT = 4


def uneven(cluster: ClusterSpec) -> Uneven:
    """Return the ratios of a cluster, with those already computed for the same cluster."""
    for each in _LAST:
        if each.cluster.topology is cluster.topology and each.cluster == cluster:
            return each
    _LAST[:] = [Uneven(cluster), *_LAST[: _KEPT - 1]]
    return _LAST[0]


def _rings(cluster: ClusterSpec, ranks: Sequence[int], near: bool) -> Transfers:
    if cluster.intra_node.meshed and near:
        return [each for members in _by_domain(cluster, ranks) for each in mesh_transfers(cluster, members)]
    return ring_transfers(cluster, ranks, 1.0)


def _by_domain(cluster: ClusterSpec, ranks: Sequence[int]) -> list[list[int]]:
    out: dict[int, list[int]] = {}
    for rank in ranks:
        out.setdefault(rank // cluster.domain_gpus, []).append(rank)
    return [members for members in out.values() if len(members) > 1]


def _exchange(cluster: ClusterSpec, ranks: Sequence[int], near: bool) -> Transfers:
    n = len(ranks)
    count = min(n - 1, MAX_PEERS)
    shifts = [1 + i * (n - 1) // count for i in range(count)]
    return [(rank, ranks[(i + shift) % n], 1 / count) for i, rank in enumerate(ranks) for shift in shifts]


def _pairs(cluster: ClusterSpec, ranks: Sequence[int], near: bool) -> Transfers:
    return [(a, b, 1.0) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True) if a != b]


_PATTERNS = {"ring": _rings, "exchange": _exchange, "pair": _pairs}


def _side_by_side(shape: tuple[int, ...], ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield disjoint groups of one shape (ranks relative to the lowest) until no more fit among all ranks."""
    taken = bytearray(ranks)
    reach = max(shape)
    for start in range(ranks - reach):
        if not taken[start] and not any(taken[start + each] for each in shape):
            for each in shape:
                taken[start + each] = 1
            yield tuple([start + each for each in shape])


def _own_links(routes: Routes, rank: int) -> dict[str, float]:
    """Return the bytes/s of a GPU's links: into its domain, of its NICs, above their leaves, and to its host."""
    wiring = routes.wiring
    beside = wiring.beside[wiring.ranks[rank]]
    by_kind = {
        kind: sum(each.usable_bytes_per_s for other, each in beside.items() if wiring.kind(other) == kind)
        for kind in ("nvswitch", "gpu", "cpu", "pcie")
    }
    fast = next((by_kind[kind] for kind in ("nvswitch", "gpu", "cpu", "pcie") if by_kind[kind]), 0.0)
    nic = spine = 0.0
    for name in routes.nics(rank):
        for switch, each in wiring.beside[name].items():
            if wiring.kind(switch) == "switch":
                nic += each.usable_bytes_per_s
                spine += sum(
                    x.usable_bytes_per_s for s, x in wiring.beside[switch].items() if wiring.kind(s) == "switch"
                )
    return {"domain": fast, "nic": nic, "spine": spine, "host": by_kind["pcie"] or by_kind["cpu"]}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
