"""Communication times on a cluster: collectives, messages between two ranks, copies to the host.

Rank r is GPU r of the cluster: node r // gpus_per_node. GPUs of a domain (a node, or 18 trays of an NVL72)
reach each other over NVLink (or the host's PCIe); others over the NICs, of which every GPU owns
nics_per_node / gpus_per_node: its fair share while all GPUs of its node communicate alike, as the ranks of a
training step do. Transfers that overlap otherwise are `contention`'s business.

A network that was read and is not regular (`ClusterSpec.topology`) keeps the closed forms of its description, each with
the ratio that its own routes leave (`uneven`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from math import exp, inf, lcm
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from topology.collectives import Choice, Group, bus_factor, choose
from topology.durations import Way, duration, message_seconds
from topology.mesh import exchange_load, links_per_gpu, relay, relay_links, rings
from topology.spec import ClusterSpec
from topology.timing import TREE_SHARE, fabric_of, slower, timing_of
from topology.torus import exchange_links, ring_links, torus_hops, torus_shape

if TYPE_CHECKING:
    from topology.uneven import Uneven


class CollectiveCost(Struct, frozen=True):
    """Seconds of one collective; `latency_s` of them would remain at size zero.

    `bus_bandwidth_bytes_per_s` by nccl-tests' convention: size/time times 2(n-1)/n for an all-reduce, (n-1)/n
    for its halves, gather, scatter and all-to-all, 1 for broadcast, reduce and send/receive.
    """

    seconds: float
    choice: Choice
    bus_bandwidth_bytes_per_s: float
    latency_s: float

    @property
    def algorithm(self) -> str:
        """The choice in words: "ring LL128"."""
        return str(self.choice)


_NOTHING = CollectiveCost(0.0, Choice("none"), 0.0, 0.0)


def left_by_others(spread: float, nodes: int) -> float:
    """The median of the least of `nodes` draws of exp(σz): what other jobs leave a collective; 1 for one node.

    >>> [round(left_by_others(0.8, n), 2) for n in (1, 2, 16)]
    [1.0, 0.65, 0.25]
    """
    if not spread or nodes < 2:
        return 1.0
    from statistics import NormalDist  # takes 10 ms to load

    return exp(spread * NormalDist().inv_cdf(1 - 0.5 ** (1 / nodes)))


class _Inside(Struct, frozen=True):
    """Bandwidths of a group's links within its domains, as `Group` names them."""

    ring: float
    chain: float
    exchange: float
    pair: float


def _of_several(group: Group, sorts: Sequence[Network]) -> Group:
    """A group with GPUs of several sorts: kernels start, step and sustain as the slower one's do.

    Bandwidths, which the routes say, stay. NCCL runs LL128 only among GPUs of one compute capability, or all from
    Hopper on (`ncclTopoTuneModel`, src/graph/tuning.cc), and in the switch what all their switches can reduce.
    """
    chips = {each.cluster.gpu.architecture for each in sorts}
    lines = group.fabric.lines and (len(chips) == 1 or chips <= {"hopper", "blackwell"})
    nvls = min(each._nvls_share for each in sorts)
    return replace(
        group,
        nvls_share=nvls,
        nvls_tree_bytes=group.nvls_tree_bytes if nvls else inf,
        protocols=all(each._protocols for each in sorts),
        timing=reduce(slower, (each._timing for each in sorts)),
        fabric=replace(group.fabric, lines=lines),
    )


class Network:
    """A cluster's communication costs, from its links' bandwidths and latencies and NCCL's protocols.

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
        """`link_scales`: what is left of the bandwidth between two nodes (or, (n, n), inside node n) by a fault;
        `nic_scales`: and of the NICs that a rank's GPU uses, by a fault or by other jobs."""
        self.cluster = cluster
        self._scales = {(min(pair), max(pair)): scale for pair, scale in (link_scales or {}).items()}
        self._nics = dict(nic_scales or {})
        self._spread = cluster.inter_node.spread
        self.domain_gpus = cluster.domain_gpus
        inter = cluster.inter_node
        self._full = cluster.intra_node.usable_bytes_per_s
        self._all_linked = cluster.intra_node.kind == "full_mesh"
        self._protocols = cluster.intra_node.kind != "pcie"
        self._straight = cluster.gpu.architecture == "other" and self._all_linked  # NCCL itself never does
        self._nvls_share = cluster.intra_node.nvls_efficiency if cluster.intra_node.kind == "nvswitch" else 0.0
        self._share = inter.usable_bytes_per_s * inter.nics_per_node / cluster.gpus_per_node
        self._shape = torus_shape(cluster.nodes, inter.nics_per_node) if inter.kind == "torus" else ()
        self._timing, self._fabric = timing_of(cluster.gpu), fabric_of(inter)
        self._groups: dict[tuple[int, ...] | range, Group] = {}
        leaves_matter = inter.oversubscription != 1.0 and not self._shape
        leaf_gpus = inter.nodes_per_leaf * cluster.gpus_per_node if leaves_matter else 1
        # Groups so far apart differ in nothing; on a torus one may lie along a row, the next round its end.
        self._alike = cluster.nodes * cluster.gpus_per_node if self._shape else lcm(leaf_gpus, self.domain_gpus)
        self._placed: dict[tuple[int, ...], Group] = {}
        self._uneven: Uneven | None = None
        if cluster.topology is not None:
            from topology.uneven import uneven

            self._uneven = uneven(cluster)
        own = (cluster.of_kind(other.gpu.name) for other in cluster.others)
        self._of_kind = {each.gpu.name: Network(each, self._scales, self._nics) for each in own}

    def collective(self, kind: str, ranks: Sequence[int], size_bytes: float) -> CollectiveCost:
        """Cost of one collective over `ranks` (in ring order); `size_bytes` as nccl-tests counts it.

        Raises `ValueError` for an unknown kind, a negative size, or no ranks.
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
        """Seconds of one message: α + S/B of its way, under the protocol that suits its size."""
        if src == dst:
            return 0.0
        seen = self._seen_by((src, dst))
        way, sorts = self.way(src, dst), self._sorts_of((src, dst))
        if not all(each._protocols for each in sorts):
            return way.latency_s + way.inter_latency_s + size_bytes / way.bytes_per_s
        timing = reduce(slower, (each._timing for each in sorts))
        return message_seconds(timing, self._fabric, way, seen.cluster.intra_node.latency_s, size_bytes)

    def way(self, src: int, dst: int) -> Way:
        """What lies between two ranks."""
        if (seen := self._seen_by((src, dst))) is not self:
            return seen.way(src, dst)
        found = self._usual_way(src, dst)
        if self._spread and found.hops:
            found = replace(found, bytes_per_s=found.bytes_per_s * left_by_others(self._spread, 2))
        if self._uneven is not None:
            found = self._uneven.way(found, src, dst)
        if self._nics and found.hops:
            left = min(self._nics.get(rank, 1.0) for rank in (src, dst))
            found = replace(found, bytes_per_s=found.bytes_per_s * left)
        return found

    @property
    def nics_differ(self) -> bool:
        """Whether faults or other jobs leave GPUs unlike parts of their NICs."""
        return bool(self._nics)

    def _usual_way(self, src: int, dst: int) -> Way:
        """The way between two ranks of a regular network.

        Between nodes one network step, or one a hop on a torus; on rails, a message to another local index
        first crosses NVLink to the GPU beside the right NIC (NCCL's PXN), one more step. Of a node whose GPUs all send
        as many ranks on, as pipelines do, no more messages leave than that: they share its NICs, one each at most.
        """
        intra, inter = self.cluster.intra_node, self.cluster.inter_node
        gpus = self.cluster.gpus_per_node
        scale = self._scale(src // gpus, dst // gpus)
        if src // self.domain_gpus == dst // self.domain_gpus:
            return Way(self._latency(src, dst), 0.0, scale * self._pair(src, dst))
        latency_s, hops, share = 0.0, 1, self._share
        senders = min(gpus, abs(dst - src))  # of a node, if all send as far
        alone = max(1.0, min(gpus / senders, inter.usable_bytes_per_s / share))
        if self._shape:
            alone = 1.0
            hops = max(1, torus_hops(src // gpus, dst // gpus, self._shape))
            share = self._torus_link(hops)
        elif self._leaf(src) != self._leaf(dst):
            share /= inter.oversubscription
        share *= alone
        if inter.kind == "rail_optimized" and src % gpus != dst % gpus:
            latency_s, share = intra.latency_s, min(share, self._full)
        return Way(latency_s, inter.latency_s * hops, scale * share, hops, alone)

    def left_inside(self, rank: int) -> float:
        """What a fault leaves of the bandwidth of the links inside a rank's node."""
        node = rank // self.cluster.gpus_per_node
        return self._scale(node, node)

    def own_links_left(self, rank: int) -> Mapping[str, float]:
        """What is left of a GPU's own links, by the names of `shares.LINKS`; of those not named, all."""
        left = {} if self._uneven is None else dict(self._uneven.of_rank(rank))
        inside, nics = self.left_inside(rank), self._nics.get(rank, 1.0)
        for name, part in (("domain", inside), ("nic", nics)):
            if part != 1.0:
                left[name] = left.get(name, 1.0) * part
        return left

    def host_copy(self, size_bytes: float, rank: int = 0) -> float:
        """Seconds to copy between a GPU and its host's memory: a launch, then the link's bandwidth."""
        if (seen := self._seen_by((rank,))) is not self:
            return seen.host_copy(size_bytes, rank)
        left, gpu = 1.0 if self._uneven is None else self._uneven.of_rank(rank)["host"], self.cluster.gpu
        return gpu.launch_overhead_s + size_bytes / (gpu.host_bandwidth_bytes_per_s * left)

    def group(self, ranks: Sequence[int]) -> Group:
        """Where the ranks lie and what each may send; kept per sequence of ranks."""
        key = ranks if isinstance(ranks, range | tuple) else tuple(ranks)
        found = self._groups.get(key)
        if found is None:
            found = self._healthy(key)
            found = self._groups[key] = self._with_others(found, key) if self._lessened else found
        return found

    def chosen(self, kind: str, ranks: Sequence[int], size_bytes: float) -> Choice:
        """Algorithm and protocol of a collective: those of links without faults, which nobody knows of beforehand."""
        return choose(kind, self._healthy(ranks) if self._lessened else self.group(ranks), size_bytes)

    def _sorts_of(self, ranks: Sequence[int]) -> list[Network]:
        """The cluster as it would be of each sort of GPU that the ranks have."""
        if not self._of_kind:
            return [self]
        return [self._of_kind.get(name, self) for name in dict.fromkeys(self.cluster.kind_of(rank) for rank in ranks)]

    def _seen_by(self, ranks: Sequence[int]) -> Network:
        """The network as ranks of one sort of GPU see it; that of the most usual sort where they have several."""
        sorts = self._sorts_of(ranks)
        return sorts[0] if len(sorts) == 1 else self

    def _healthy(self, ranks: Sequence[int]) -> Group:
        if self._uneven is not None:
            key = tuple(ranks)
            if key not in self._placed:
                sorts = self._sorts_of(key)
                if sorts != [self] and len(sorts) == 1:
                    self._placed[key] = sorts[0]._healthy(key)
                else:
                    found = self._uneven.group(self._place(key), key)
                    self._placed[key] = found if len(sorts) == 1 else _of_several(found, sorts)
            return self._placed[key]
        start = ranks[0] // self._alike * self._alike
        like = tuple([rank - start for rank in ranks])  # lies in domains and leaves as these do
        if like not in self._placed:
            self._placed[like] = self._place(like)
        return self._placed[like]

    def _place(self, ranks: Sequence[int]) -> Group:
        domain_gpus = self.domain_gpus
        counts = Counter([rank // domain_gpus for rank in ranks]).values()
        fewest, most = min(counts), max(counts)
        inside = self._inside(ranks, most)
        ring, tree, exchange, pair = self._between(ranks, fewest)
        return Group(
            ranks=len(ranks),
            domains=len(counts),
            members=fewest,
            members_max=most,
            ring_bytes_per_s=inside.ring,
            chain_bytes_per_s=inside.chain,
            exchange_bytes_per_s=inside.exchange,
            pair_bytes_per_s=inside.pair,
            latency_s=self.cluster.intra_node.latency_s,
            inter_ring_bytes_per_s=ring,
            inter_tree_bytes_per_s=tree,
            inter_exchange_bytes_per_s=exchange,
            inter_pair_bytes_per_s=pair,
            inter_latency_s=self.cluster.inter_node.latency_s,
            nics=max(1.0, fewest * self.cluster.inter_node.nics_per_node / self.cluster.gpus_per_node),
            nvls_share=self._nvls_share,
            nvls_tree_bytes=self._nvls_tree_bytes(fewest, most, len(counts)),
            protocols=self._protocols,
            timing=self._timing,
            fabric=self._fabric,
            straight=self._straight,
            torus_steps=0 if self._protocols else self._along_axes(ranks)[1],  # NCCL and its like know no torus
        )

    def _nvls_tree_bytes(self, fewest: int, most: int, domains: int) -> float:
        """From which size on NCCL considers NVLS with trees between domains; inf where it never does.

        It needs more than two GPUs in each domain (`ncclNvlsInit`, src/transport/nvls.cc), as many in all, and domains
        that are nodes (src/graph/tuning.cc switches it off on multi-node NVLink).
        """
        fabric, nodes = self._fabric, self.domain_gpus == self.cluster.gpus_per_node
        possible = self._nvls_share > 0 and nodes and 2 < fewest == most and domains <= fabric.nvls_tree_domains
        return fabric.nvls_tree_bytes if possible else inf

    def _inside(self, ranks: Sequence[int], most: int) -> _Inside:
        """On a switch or a PCIe host a GPU's whole bandwidth, whomever it sends to; on a mesh the links there are.

        Where no ring fits on the mesh, rings close over PCIe, and an all-reduce goes up and down one chain of
        single links (NCCL makes no more chains than rings).
        """
        full = self._full
        if not self.cluster.intra_node.meshed or most == 1:
            return _Inside(full, full / 2, full, full)
        gpus, domains = self.cluster.gpus_per_node, [rank // self.domain_gpus for rank in ranks]
        counts = Counter(domains)
        fullest = max(sorted(counts), key=lambda domain: counts[domain])
        members = tuple([rank % gpus for rank, domain in zip(ranks, domains, strict=True) if domain == fullest])
        lane = full / links_per_gpu(gpus, self._all_linked)
        fit = rings(gpus, tuple(sorted(members)), self._all_linked)
        following = zip(members, (*members[1:], members[0]), strict=True)
        return _Inside(
            ring=lane * fit or self.cluster.gpu.host_bandwidth_bytes_per_s,
            chain=lane * max(1.0, fit / 2),
            exchange=lane * (len(members) - 1) / exchange_load(gpus, members, self._all_linked),
            pair=min(self._pair(a, b) for a, b in following),
        )

    def _pair(self, src: int, dst: int) -> float:
        """Bandwidth between two GPUs of one domain; on a mesh the links between them or over a third GPU."""
        intra, gpus = self.cluster.intra_node, self.cluster.gpus_per_node
        if not intra.meshed:
            return self._full
        lane = self._full / links_per_gpu(gpus, self._all_linked)
        return lane * relay_links(gpus, src % gpus, dst % gpus, self._all_linked)

    def _latency(self, src: int, dst: int) -> float:
        """Within a domain one step, on a mesh one a link."""
        intra, gpus = self.cluster.intra_node, self.cluster.gpus_per_node
        return intra.latency_s * (len(relay(gpus, src % gpus, dst % gpus, self._all_linked)) - 1 if intra.meshed else 1)

    def _between(self, ranks: Sequence[int], fewest: int) -> tuple[float, float, float, float]:
        """A GPU's share of the NICs for rings, trees, exchanges and pairs.

        Above the leaves 1/oversubscription of it is left. Of a ring's k domains under one leaf only the last
        sends above it, so the ring gets min(1, k/oversubscription); trees and pairs are taken to cross; of an
        exchange the part that leaves the leaf crosses. On a torus rings use the links of all axes that the group spans,
        a pair the links of one direction, an exchange those that `exchange_links` says.
        """
        share, over = self._share, self.cluster.inter_node.oversubscription
        if self._shape:
            part, _ = self._along_axes(ranks)
            return share * part, share * part, share * self.exchange_on_torus(ranks)[0], self._torus_link(1)
        pair = share * max(1.0, min(fewest, self.cluster.inter_node.usable_bytes_per_s / share))  # one leaves a domain
        if over == 1.0:
            return share, share, share, pair
        span = self.cluster.inter_node.nodes_per_leaf * self.cluster.gpus_per_node
        leaves = Counter([rank // span for rank in ranks])
        if len(leaves) == 1:
            return share, share, share, pair
        domains = {(rank // span, rank // self.domain_gpus) for rank in ranks}
        together = min(Counter([leaf for leaf, _ in domains]).values())
        above = (len(ranks) - min(leaves.values())) / max(1, len(ranks) - fewest)
        return (
            share * min(1.0, together / over),
            share / over,
            share / max(1.0, min(1.0, above) * over),
            pair / over,
        )

    def _along_axes(self, ranks: Sequence[int]) -> tuple[float, int]:
        """The part of a torus's links that a group's rings fill, and the steps of a pass; see `ring_links`."""
        nodes = {rank // self.cluster.gpus_per_node for rank in ranks}
        return ring_links(self._shape, nodes) if self._shape and len(nodes) > 1 else (1.0, 0)

    def exchange_on_torus(self, ranks: Sequence[int]) -> tuple[float, float]:
        """The part of a torus's links that an exchange fills, and the links a byte passes; see `exchange_links`."""
        nodes = tuple(sorted({rank // self.cluster.gpus_per_node for rank in ranks}))
        return exchange_links(self._shape, nodes) if self._shape and len(nodes) > 1 else (1.0, 1.0)

    @property
    def _lessened(self) -> bool:
        """Whether faults or other jobs take a part of what links carry, of which NCCL knows nothing."""
        return bool(self._scales or self._nics or self._spread)

    def _with_others(self, group: Group, ranks: Sequence[int]) -> Group:
        """The group with the faults of links, and with what other jobs leave of its nodes' NICs.

        Of the node that has least; a tree over more than two domains uses no more than `TREE_SHARE` of them anyway.
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
        """The group with its links' faults: rings suffer from those between successive nodes.

        Trees are taken to use every degraded pair; of an exchange's bytes only those of the pair are slowed.
        """
        nodes = [rank // self.cluster.gpus_per_node for rank in ranks]
        per_domain = self.domain_gpus // self.cluster.gpus_per_node
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

    def _torus_link(self, hops: int) -> float:
        """A GPU's share of the links of one direction, when all nodes send that many hops the same way."""
        return self._share / (2 * len(self._shape) * hops)

    def _leaf(self, rank: int) -> int:
        return rank // (self.cluster.gpus_per_node * self.cluster.inter_node.nodes_per_leaf)
