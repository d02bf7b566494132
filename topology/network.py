"""Compute communication times on a cluster: collectives, messages between two ranks, copies to the host.

`regular` has the bandwidths of a group while all GPUs of its nodes communicate alike, as in a training step. This
module adds faults, other jobs and mixed clusters. `contention` handles other transfers that overlap.

A network that is not regular (`ClusterSpec.topology`) uses the closed forms of its description, each scaled by a ratio
that its own routes give (`uneven`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import exp
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from topology.collective_kinds import bus_factor
from topology.collectives import Choice, choose
from topology.durations import NetworkPath, duration, message_seconds
from topology.group import Group
from topology.regular import RegularNetwork, of_several
from topology.spec import ClusterSpec
from topology.timing import TREE_SHARE, slower

if TYPE_CHECKING:
    from topology.uneven import Uneven


class CollectiveCost(Struct, frozen=True):
    """Hold the seconds of one collective; `latency_s` of them would remain at size zero.

    `bus_bandwidth_bytes_per_s`, as nccl-tests defines it: size/time times 2(n-1)/n for an all-reduce, (n-1)/n for an
    all-gather, reduce-scatter, gather, scatter and all-to-all, 1 for a broadcast, reduce and send/receive.
    """

    seconds: float
    choice: Choice
    bus_bandwidth_bytes_per_s: float
    latency_s: float

    @property
    def algorithm(self) -> str:
        """The choice as text: "ring LL128"."""
        return str(self.choice)


_NOTHING = CollectiveCost(0.0, Choice("none"), 0.0, 0.0)


def left_by_others(spread: float, nodes: int) -> float:
    """Return the part of the NICs that other jobs leave a collective: the median minimum of `nodes` draws of exp(σz).

    It is 1 for one node. `spread`: σ.

    >>> [round(left_by_others(0.8, n), 2) for n in (1, 2, 16)]
    [1.0, 0.65, 0.25]
    """
    if not spread or nodes < 2:
        return 1.0
    from statistics import NormalDist  # takes 10 ms to load

    return exp(spread * NormalDist().inv_cdf(1 - 0.5 ** (1 / nodes)))


class Network:
    """Compute a cluster's communication times from its links' bandwidths and latencies and NCCL's protocols.

    >>> from topology.presets import CLUSTERS
    >>> network = Network(CLUSTERS["dgx-a100"])
    >>> cost = network.collective("all_reduce", range(8), 1 << 30)
    >>> cost.algorithm, round(cost.bus_bandwidth_bytes_per_s / 1e9)
    ('ring Simple', 215)
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        link_scales: Mapping[tuple[int, int], float] | None = None,
        nic_scales: Mapping[int, float] | None = None,
    ) -> None:
        """Create the network of `cluster` with faults.

        `link_scales`: the part of the bandwidth between two nodes that a fault leaves; (n, n) means inside node n.
        `nic_scales`: by rank, the part of its GPU's NICs that a fault or other jobs leave.
        """
        self.cluster = cluster
        self._scales = {(min(pair), max(pair)): scale for pair, scale in (link_scales or {}).items()}
        self._nics = dict(nic_scales or {})
        self._spread = cluster.inter_node.spread
        self.regular = RegularNetwork(cluster)
        self._groups: dict[tuple[int, ...] | range, Group] = {}
        self._on_routes: dict[tuple[int, ...], Group] = {}
        self._uneven: Uneven | None = None
        if cluster.topology is not None:
            from topology.uneven import uneven

            self._uneven = uneven(cluster)
        own = (cluster.of_kind(other.gpu.name) for other in cluster.others)
        self._of_kind = {each.gpu.name: Network(each, self._scales, self._nics) for each in own}

    def collective(self, kind: str, ranks: Sequence[int], size_bytes: float) -> CollectiveCost:
        """Return the cost of one collective over `ranks` (in ring order); `size_bytes` as nccl-tests counts it.

        Raises:
            ValueError: for an unknown kind, a negative size, or no ranks.
        """
        if size_bytes < 0 or not len(ranks):
            raise ValueError(f"{kind} of {size_bytes} bytes over {len(ranks)} ranks; it needs bytes ≥ 0, ranks ≥ 1")
        if len(ranks) == 1:
            return _NOTHING
        choice = self.chosen(kind, ranks, size_bytes)
        cost = duration(kind, *choice, self.group(ranks), size_bytes)
        seconds = cost.seconds
        bus = size_bytes / seconds * bus_factor(kind, len(ranks)) if seconds else 0.0
        return CollectiveCost(seconds, choice, bus, cost.latency_s)

    def send(self, src: int, dst: int, size_bytes: float) -> float:
        """Return the seconds of one message: α + S/B of its path, with the protocol that NCCL uses for its size."""
        if src == dst:
            return 0.0
        seen = self._seen_by((src, dst))
        path, networks = self.path(src, dst), self._networks_of((src, dst))
        if not all(each.regular.protocols for each in networks):
            return path.latency_s + path.inter_latency_s + size_bytes / path.bytes_per_s
        timing = reduce(slower, (each.regular.timing for each in networks))
        return message_seconds(timing, self.regular.fabric, path, seen.cluster.intra_node.latency_s, size_bytes)

    def path(self, src: int, dst: int) -> NetworkPath:
        """Return the latency and bandwidth of a message between two ranks."""
        if (seen := self._seen_by((src, dst))) is not self:
            return seen.path(src, dst)
        found, gpus = self.regular.path(src, dst), self.cluster.gpus_per_node
        if (scale := self._scale(src // gpus, dst // gpus)) != 1.0:
            found = replace(found, bytes_per_s=scale * found.bytes_per_s)
        if self._spread and found.hops:
            found = replace(found, bytes_per_s=found.bytes_per_s * left_by_others(self._spread, 2))
        if self._uneven is not None:
            found = self._uneven.path(found, src, dst)
        if self._nics and found.hops:
            left = min(self._nics.get(rank, 1.0) for rank in (src, dst))
            found = replace(found, bytes_per_s=found.bytes_per_s * left)
        return found

    @property
    def nics_differ(self) -> bool:
        """Tell whether faults or other jobs leave GPUs different parts of their NICs' bandwidth."""
        return bool(self._nics)

    def left_inside(self, rank: int) -> float:
        """Return the part of the bandwidth inside a rank's node that a fault leaves."""
        node = rank // self.cluster.gpus_per_node
        return self._scale(node, node)

    def own_links_left(self, rank: int) -> Mapping[str, float]:
        """Return the part left of each of a GPU's own links, by the names of `shares.LINKS`; missing names mean 1."""
        left = {} if self._uneven is None else dict(self._uneven.of_rank(rank))
        inside, nics = self.left_inside(rank), self._nics.get(rank, 1.0)
        for name, part in (("domain", inside), ("nic", nics)):
            if part != 1.0:
                left[name] = left.get(name, 1.0) * part
        return left

    def host_copy(self, size_bytes: float, rank: int = 0) -> float:
        """Return the seconds of a copy between a GPU and its host's memory: a launch, then the link's bandwidth."""
        if (seen := self._seen_by((rank,))) is not self:
            return seen.host_copy(size_bytes, rank)
        left, gpu = 1.0 if self._uneven is None else self._uneven.of_rank(rank)["host"], self.cluster.gpu
        return gpu.launch_overhead_s + size_bytes / (gpu.host_bandwidth_bytes_per_s * left)

    def group(self, ranks: Sequence[int]) -> Group:
        """Return where the ranks lie and what each may send; cached per sequence of ranks."""
        key = ranks if isinstance(ranks, range | tuple) else tuple(ranks)
        found = self._groups.get(key)
        if found is None:
            found = self._healthy(key)
            found = self._groups[key] = self._with_others(found, key) if self._lessened else found
        return found

    def chosen(self, kind: str, ranks: Sequence[int], size_bytes: float) -> Choice:
        """Return a collective's algorithm and protocol, chosen without faults, because NCCL does not know them."""
        return choose(kind, self._healthy(ranks) if self._lessened else self.group(ranks), size_bytes)

    def _networks_of(self, ranks: Sequence[int]) -> list[Network]:
        """Return one network for each kind of GPU that the ranks have, as if the whole cluster were of that kind."""
        if not self._of_kind:
            return [self]
        return [self._of_kind.get(name, self) for name in dict.fromkeys(self.cluster.kind_of(rank) for rank in ranks)]

    def _seen_by(self, ranks: Sequence[int]) -> Network:
        """Return the network of the ranks' kind of GPU; if they have several kinds, that of the most frequent one."""
        networks = self._networks_of(ranks)
        return networks[0] if len(networks) == 1 else self

    def _healthy(self, ranks: Sequence[int]) -> Group:
        """Return the group without faults and other jobs."""
        if self._uneven is None:
            return self.regular.group(ranks)
        key = tuple(ranks)
        if key not in self._on_routes:
            self._on_routes[key] = self._by_routes(self._uneven, key)
        return self._on_routes[key]

    def _by_routes(self, uneven: Uneven, ranks: tuple[int, ...]) -> Group:
        """Return the group on a network that is not regular, scaled by what its routes give."""
        networks = self._networks_of(ranks)
        if len(networks) == 1 and networks[0] is not self:
            return networks[0]._healthy(ranks)
        found = uneven.group(self.regular.place(ranks), ranks)
        return found if len(networks) == 1 else of_several(found, [each.regular for each in networks])

    @property
    def _lessened(self) -> bool:
        """Tell whether faults or other jobs reduce the bandwidth of links; NCCL does not know of this."""
        return bool(self._scales or self._nics or self._spread)

    def _with_others(self, group: Group, ranks: Sequence[int]) -> Group:
        """Return the group with the faults of links, and with what other jobs leave of its slowest node's NICs.

        A tree over more than two domains uses at most `TREE_SHARE` of the NICs anyway.
        """
        left = left_by_others(self._spread, group.domains)
        if self._nics and group.domains > 1:
            left *= min(self._nics.get(rank, 1.0) for rank in ranks)
        found = self._degrade(group, ranks) if self._scales else group
        if left == 1.0:
            return found
        return replace(
            found,
            inter_ring_bytes_per_s=found.inter_ring_bytes_per_s * left,
            inter_tree_bytes_per_s=found.inter_tree_bytes_per_s
            * (min(1.0, left / TREE_SHARE) if group.domains > 2 else left),
            inter_exchange_bytes_per_s=found.inter_exchange_bytes_per_s * left,
            inter_pair_bytes_per_s=found.inter_pair_bytes_per_s * left,
        )

    def _scale(self, node: int, other: int) -> float:
        return self._scales.get((min(node, other), max(node, other)), 1.0)

    def _degrade(self, group: Group, ranks: Sequence[int]) -> Group:
        """Return the group with its links' faults. Those between successive nodes slow rings.

        Trees are assumed to use every degraded pair. Of an exchange only the bytes between the two nodes are slowed.
        """
        nodes = [rank // self.cluster.gpus_per_node for rank in ranks]
        per_domain = self.regular.domain_gpus // self.cluster.gpus_per_node
        steps = {(min(pair), max(pair)) for pair in zip(nodes, [*nodes[1:], nodes[0]], strict=True)}
        reached = set(nodes)
        scaled = {pair: scale for pair, scale in self._scales.items() if reached.issuperset(pair)}
        near = {pair: scale for pair, scale in scaled.items() if pair[0] // per_domain == pair[1] // per_domain}
        far = {pair: scale for pair, scale in scaled.items() if pair not in near}
        ring = min((scale for pair, scale in far.items() if pair in steps), default=1.0)
        inside = min((scale for pair, scale in near.items() if pair in steps), default=1.0)
        outside = group.ranks - group.members
        exchange = min(
            (scale * outside / max(nodes.count(end) for end in pair) for pair, scale in far.items()),
            default=1,
        )
        return replace(
            group,
            ring_bytes_per_s=group.ring_bytes_per_s * inside,
            chain_bytes_per_s=group.chain_bytes_per_s * inside,
            exchange_bytes_per_s=group.exchange_bytes_per_s * min(near.values(), default=1.0),
            pair_bytes_per_s=group.pair_bytes_per_s * inside,
            inter_ring_bytes_per_s=group.inter_ring_bytes_per_s * ring,
            inter_tree_bytes_per_s=group.inter_tree_bytes_per_s * min(far.values(), default=1.0),
            inter_exchange_bytes_per_s=group.inter_exchange_bytes_per_s * min(1.0, exchange),
            inter_pair_bytes_per_s=group.inter_pair_bytes_per_s * ring,
        )
