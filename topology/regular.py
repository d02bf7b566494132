"""Compute the bandwidths of groups of ranks and of pairs on a regular cluster, without faults and other jobs.

Rank r is GPU r of the cluster, on node r // gpus_per_node. GPUs of a domain (a node, or 18 trays of an NVL72) reach
each other over NVLink (or the host's PCIe), others over the NICs. Every GPU has nics_per_node / gpus_per_node of these:
its fair share while all GPUs of its node communicate alike, as in a training step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import reduce
from math import inf, lcm

from msgspec import Struct
from msgspec.structs import replace

from topology.durations import NetworkPath
from topology.group import Group, Leaves
from topology.mesh import exchange_load, links_per_gpu, relay, relay_links, rings
from topology.nccl import nccl_at
from topology.spec import ClusterSpec
from topology.timing import fabric_of, slower, timing_of
from topology.torus import exchange_links, ring_links, torus_hops, torus_shape


class _Inside(Struct, frozen=True):
    """Hold the bandwidths of a group's links within its domains, as `Group` names them."""

    ring: float
    chain: float
    exchange: float
    pair: float


class RegularNetwork:
    """Describe the groups and paths of a cluster whose nodes, domains and leaves are all equal.

    `gpu_bytes_per_s`: bandwidth of a GPU inside its domain; `nic_share_bytes_per_s`: of its part of the NICs; `shape`:
    of a torus, otherwise empty; `protocols`: whether NCCL's protocols apply (not on PCIe hosts); `nccl`: whether it is
    NCCL itself; `pat`: whether that considers PAT for one GPU of each node (`ncclPatEnable`, src/graph/tuning.cc);
    `sends_directly`: whether collectives send directly to every rank.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster, self.domain_gpus = cluster, cluster.domain_gpus
        intra, inter = cluster.intra_node, cluster.inter_node
        self.gpu_bytes_per_s = intra.usable_bytes_per_s
        self.all_linked = intra.all_linked
        self.protocols = not intra.through_host
        self.nccl = self.protocols and cluster.gpu.chip.has_cuda
        self.pat = nccl_at(None).pat if inter.pat is None else inter.pat
        self.sends_directly = cluster.gpu.chip.sends_to_all and self.all_linked
        self.nvls_share = intra.nvls_efficiency if intra.switched else 0.0
        self.nic_share_bytes_per_s = inter.usable_bytes_per_s * inter.nics_per_node / cluster.gpus_per_node
        self.shape = torus_shape(cluster.nodes, inter.nics_per_node) if inter.is_torus else ()
        self.timing, self.fabric = timing_of(cluster.gpu), fabric_of(inter)
        leaves_matter = inter.oversubscription != 1.0 and not self.shape
        leaf_gpus = inter.nodes_per_leaf * cluster.gpus_per_node if leaves_matter else 1
        # Groups this far apart are equal. On a torus they are not: one may lie along a row, the next around its end.
        self._period = cluster.nodes * cluster.gpus_per_node if self.shape else lcm(leaf_gpus, self.domain_gpus)
        self._placed: dict[tuple[int, ...], Group] = {}

    def group(self, ranks: Sequence[int]) -> Group:
        """Return `place`, cached for all groups that lie in domains and leaves as these ranks do."""
        start = ranks[0] // self._period * self._period
        like = tuple([rank - start for rank in ranks])
        if like not in self._placed:
            self._placed[like] = self.place(like)
        return self._placed[like]

    def path(self, src: int, dst: int) -> NetworkPath:
        """Return the path between two ranks.

        Between nodes it has one network step, on a torus one for each hop. On rails, a message to another local index
        first crosses NVLink to the GPU beside the right NIC (NCCL's PXN), which is one more step. If all GPUs of a node
        send to the rank s further on, as in pipelines, at most s messages leave the node. They share its NICs, each
        using at most one.
        """
        intra, inter = self.cluster.intra_node, self.cluster.inter_node
        gpus = self.cluster.gpus_per_node
        if src // self.domain_gpus == dst // self.domain_gpus:
            pair = self._pair(src, dst)
            return NetworkPath(self._latency(src, dst), 0.0, pair, links=pair / self.gpu_bytes_per_s)
        latency_s, hops, share = 0.0, 1, self.nic_share_bytes_per_s
        senders = min(gpus, abs(dst - src))  # GPUs of a node whose messages leave it, if all send equally far
        alone = max(1.0, min(gpus / senders, inter.usable_bytes_per_s / share))
        if self.shape:
            alone = 1.0
            hops = max(1, torus_hops(src // gpus, dst // gpus, self.shape))
            share = self._torus_link(hops)
        elif self._leaf(src) != self._leaf(dst):
            share /= inter.oversubscription
        share *= alone
        if inter.has_rails and src % gpus != dst % gpus:
            latency_s, share = intra.latency_s, min(share, self.gpu_bytes_per_s)
        return NetworkPath(latency_s, inter.latency_s * hops, share, hops, alone)

    def place(self, ranks: Sequence[int]) -> Group:
        """Return where the ranks lie and what each may send."""
        domain_gpus = self.domain_gpus
        counts = Counter([rank // domain_gpus for rank in ranks]).values()
        fewest, most = min(counts), max(counts)
        inside = self._inside(ranks, most)
        leaves = self._leaves(ranks, fewest)
        alone = self.nccl and not self.shape and len(counts) > 1 and most == 1
        ring, tree, exchange, pair = self._between(ranks, fewest, leaves)
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
            nvls_share=self.nvls_share,
            nvls_tree_bytes=self._nvls_tree_bytes(fewest, most, len(counts)),
            protocols=self.protocols,
            timing=self.timing,
            fabric=self.fabric,
            switched=self.cluster.intra_node.switched,
            sends_directly=self.sends_directly,
            exchange_links=inside.exchange / self.gpu_bytes_per_s,
            pair_links=inside.pair / self.gpu_bytes_per_s,
            leaves=leaves,
            sharp=self._sharp(fewest, most, len(counts)),
            pat=alone and self.pat,
            alone_before_pat=alone and not self.pat,
            torus_steps=0 if self.protocols else self._along_axes(ranks)[1],  # NCCL and its like know no torus
        )

    def _nvls_tree_bytes(self, fewest: int, most: int, domains: int) -> float:
        """Return the size from which NCCL considers NVLS with trees between domains; inf if it never does.

        It needs more than two GPUs in each domain (`ncclNvlsInit`, src/transport/nvls.cc), equal numbers of them, and
        domains that are nodes (src/graph/tuning.cc switches it off on multi-node NVLink).
        """
        fabric, nodes = self.fabric, self.domain_gpus == self.cluster.gpus_per_node
        possible = self.nvls_share > 0 and nodes and 2 < fewest == most and domains <= fabric.nvls_tree_domains
        return fabric.nvls_tree_bytes if possible else inf

    def _sharp(self, fewest: int, most: int, domains: int) -> bool:
        """Tell whether switches between nodes reduce for a group: if described, on NCCL, for equally many GPUs a node.

        NCCL asks for at most 8 of a node (NCCL_MAX_DIRECT_ARITY, `ncclGetAlgoInfo`), in two nodes or more.
        """
        described = self.cluster.inter_node.sharp and not self.shape and self.nccl
        nodes = self.domain_gpus == self.cluster.gpus_per_node
        return described and nodes and domains > 1 and fewest == most <= 8

    def _inside(self, ranks: Sequence[int], most: int) -> _Inside:
        """Return a group's bandwidths within its domains.

        On a switch or a PCIe host these are a GPU's whole bandwidth, on a mesh that of the links between the members.
        If no ring fits on the mesh, rings go over PCIe, and an all-reduce uses one chain of single links (NCCL makes no
        more chains than rings).
        """
        full = self.gpu_bytes_per_s
        if not self.cluster.intra_node.meshed or most == 1:
            return _Inside(full, full / 2, full, full)
        gpus, domains = self.cluster.gpus_per_node, [rank // self.domain_gpus for rank in ranks]
        counts = Counter(domains)
        fullest = max(sorted(counts), key=lambda domain: counts[domain])
        members = tuple([rank % gpus for rank, domain in zip(ranks, domains, strict=True) if domain == fullest])
        lane = full / links_per_gpu(gpus, self.all_linked)
        fit = rings(gpus, tuple(sorted(members)), self.all_linked)
        following = zip(members, (*members[1:], members[0]), strict=True)
        return _Inside(
            ring=lane * fit or self.cluster.gpu.host_bandwidth_bytes_per_s,
            chain=lane * max(1.0, fit / 2),
            exchange=lane * (len(members) - 1) / exchange_load(gpus, members, self.all_linked),
            pair=min(self._pair(a, b) for a, b in following),
        )

    def _pair(self, src: int, dst: int) -> float:
        """Return the bandwidth between two GPUs of one domain; on a mesh of their direct links, or over a third GPU."""
        intra, gpus = self.cluster.intra_node, self.cluster.gpus_per_node
        if not intra.meshed:
            return self.gpu_bytes_per_s
        lane = self.gpu_bytes_per_s / links_per_gpu(gpus, self.all_linked)
        return lane * relay_links(gpus, src % gpus, dst % gpus, self.all_linked)

    def _latency(self, src: int, dst: int) -> float:
        """Return the latency within a domain: one step, on a mesh one for each link."""
        intra, gpus = self.cluster.intra_node, self.cluster.gpus_per_node
        return intra.latency_s * (len(relay(gpus, src % gpus, dst % gpus, self.all_linked)) - 1 if intra.meshed else 1)

    def _leaves(self, ranks: Sequence[int], fewest: int) -> Leaves | None:
        """Return what a group sends above its leaf switches; None under one leaf, or if nothing is narrower there."""
        if self.cluster.inter_node.oversubscription == 1.0 or self.shape:
            return None
        members = Counter([self._leaf(rank) for rank in ranks])
        if len(members) == 1:
            return None
        domains = {(self._leaf(rank), rank // self.domain_gpus) for rank in ranks}
        together = min(Counter([leaf for leaf, _ in domains]).values())
        above = (len(ranks) - min(members.values())) / max(1, len(ranks) - fewest)
        return Leaves(1 / together, min(1.0, above))

    def _between(self, ranks: Sequence[int], fewest: int, leaves: Leaves | None) -> tuple[float, float, float, float]:
        """Return a GPU's share of the NICs for rings, trees, exchanges and pairs.

        Above the leaves 1/oversubscription of it is left, for the bytes that `Leaves` counts; trees and pairs are
        assumed to cross the spine. On a torus, rings use the links of all axes that the group spans, a pair those of
        one direction, an exchange those of `exchange_links`.
        """
        share, over = self.nic_share_bytes_per_s, self.cluster.inter_node.oversubscription
        if self.shape:
            part, _ = self._along_axes(ranks)
            return share * part, share * part, share * self.exchange_on_torus(ranks)[0], self._torus_link(1)
        pair = share * max(1.0, min(fewest, self.cluster.inter_node.usable_bytes_per_s / share))  # one leaves a domain
        if leaves is None:
            return share, share, share, pair
        return (
            share / max(1.0, leaves.ring * over),
            share / over,
            share / max(1.0, leaves.exchange * over),
            pair / over,
        )

    def _along_axes(self, ranks: Sequence[int]) -> tuple[float, int]:
        """Return the part of a torus's links that a group's rings fill, and the steps of a pass; see `ring_links`."""
        nodes = {rank // self.cluster.gpus_per_node for rank in ranks}
        return ring_links(self.shape, nodes) if self.shape and len(nodes) > 1 else (1.0, 0)

    def exchange_on_torus(self, ranks: Sequence[int]) -> tuple[float, float]:
        """Return the part of a torus's links that an exchange fills, and the links a byte passes (`exchange_links`)."""
        nodes = tuple(sorted({rank // self.cluster.gpus_per_node for rank in ranks}))
        return exchange_links(self.shape, nodes) if self.shape and len(nodes) > 1 else (1.0, 1.0)

    def _torus_link(self, hops: int) -> float:
        """Return a GPU's share of the links of one direction, if all nodes send `hops` hops in it."""
        return self.nic_share_bytes_per_s / (2 * len(self.shape) * hops)

    def _leaf(self, rank: int) -> int:
        return rank // (self.cluster.gpus_per_node * self.cluster.inter_node.nodes_per_leaf)


def of_several(group: Group, networks: Sequence[RegularNetwork]) -> Group:
    """Return a group with GPUs of several kinds, with the startup, steps and shares of the slowest kind.

    Its bandwidths come from the routes and do not change. NCCL uses LL128 only among GPUs of one compute capability or
    all from Hopper on (`ncclTopoTuneModel`, src/graph/tuning.cc), and reduces in switches only if all of them can.
    """
    chips = [each.cluster.gpu.chip for each in networks]
    lines = group.fabric.lines and (len(set(chips)) == 1 or all(chip.mixes_ll128 for chip in chips))
    nvls = min(each.nvls_share for each in networks)
    return replace(
        group,
        nvls_share=nvls,
        nvls_tree_bytes=group.nvls_tree_bytes if nvls else inf,
        protocols=all(each.protocols for each in networks),
        timing=reduce(slower, (each.timing for each in networks)),
        fabric=replace(group.fabric, lines=lines),
    )
