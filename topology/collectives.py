"""Compute collective times in closed form: α–β per level, one function per algorithm.

A group of n ranks lies in d domains (a domain: the GPUs that share NVLink, or one PCIe host) with g members
in each. S is the size as nccl-tests counts it: the whole buffer (the gathered output of an all-gather, the
input of a reduce-scatter, what each rank holds for an all-to-all). B is the bandwidth of one GPU's links inside the
domain, b that of its share of the NICs, both without an efficiency factor. α is one step inside a domain, α' one step
between domains.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
2005 (α–β costs of ring and pairwise algorithms); P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009 (the ring's 2(n-1)/n is optimal); P. Sanders, J. Speck,
J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009, and NCCL 2.4
(double binary trees); NCCL's cost model, src/graph/tuning.cc (which steps cross nodes, chains inside them);
nccl-tests, doc/PERFORMANCE.md (bus bandwidth).

The functions give bare α–β. `choose` adds the protocols (`protocols`) on links that NCCL runs on, and chooses as NCCL
does; `durations` gives the time of the choice. Left out: NCCL's chains of SHARP (CollNetChain), its limits per channel,
and its kernels for registered windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from topology.algorithms import TRAITS, Traits
from topology.collective_kinds import KINDS, sent_between_trees
from topology.group import Group
from topology.protocols import COLLNET_NVLINK_S, COLLNET_PEER_S, LL, PAT_SHOWS, PLAIN, SIMPLE, Protocol
from topology.timing import Timing

P2P_PER_ROUND = 8 * 16
"""Sends in flight at once: 8 on each of 16 channels (NCCL_MAX_DEV_WORK_P2P_PER_BATCH, src/include/device.h;
`ncclP2pChannelBaseForRound`, src/include/channel.h)."""


class AlphaBeta(Struct, frozen=True):
    """Hold the seconds of one algorithm: `latency_s` of its steps, and `transfer_s` proportional to the size."""

    latency_s: float
    transfer_s: float

    @property
    def seconds(self) -> float:
        return self.latency_s + self.transfer_s

    def twice(self) -> AlphaBeta:
        """Return a reduce-scatter and an all-gather one after the other: an all-reduce."""
        return AlphaBeta(2 * self.latency_s, 2 * self.transfer_s)


Algorithm = Callable[[Group, float], AlphaBeta]


def _ring_pass(group: Group, sent_bytes: float) -> float:
    """Return the seconds in which every rank sends `sent_bytes` to its successor.

    NCCL lays one ring per NIC, each leaving the node at another GPU. Of a GPU's g rings g-1 stay on NVLink and one
    leaves, so NVLink carries (g-1)/g of what it sends. `sent_bytes` leave the node once, through the NICs of all
    members together.
    """
    if group.domains == 1:
        return sent_bytes / group.ring_bytes_per_s
    inside = sent_bytes * (group.members_max - 1) / group.members_max / group.ring_bytes_per_s
    return max(inside, sent_bytes / group.nodes_share_bytes_per_s)


def _ring_latency(group: Group) -> float:
    """Return the latency of a round of n-1 steps.

    The ring has d hops between domains (with two domains two: there and back). A block passes all n hops but one, so
    the last blocks to arrive have crossed all d. (NCCL's own estimate, nInterSteps, counts d-1.)
    """
    inter_steps = 0 if group.domains == 1 else min(group.domains, group.ranks - 1)
    inter_hops = max(inter_steps, group.torus_steps)  # a step between distant places of a torus takes several hops
    return (group.ranks - 1 - inter_steps) * group.latency_s + inter_hops * group.inter_latency_s


def ring_all_gather(group: Group, size_bytes: float) -> AlphaBeta:
    """(n-1)α + S(n-1)/n / B (Thakur 2005, section 4.1); a reduce-scatter costs the same."""
    sent_bytes = size_bytes * (group.ranks - 1) / group.ranks
    return AlphaBeta(_ring_latency(group), _ring_pass(group, sent_bytes))


def ring_all_reduce(group: Group, size_bytes: float) -> AlphaBeta:
    """2(n-1)α + 2S(n-1)/n / B: reduce-scatter, then all-gather (Patarasuk & Yuan 2009)."""
    return ring_all_gather(group, size_bytes).twice()


def ring_broadcast(group: Group, size_bytes: float) -> AlphaBeta:
    """(n-1)α + S/B: a pipeline along the ring (NCCL); a reduce is the same backwards."""
    return AlphaBeta(_ring_latency(group), _ring_pass(group, size_bytes))


def tree_all_reduce(group: Group, size_bytes: float) -> AlphaBeta:
    """Double binary tree over the domains, a chain inside each (NCCL 2.4).

    2((g-1)α + ⌈log2 d⌉α') + max(S/C, wS / gb). A GPU inside a chain passes S up and S down, so C is half of B
    (NCCL's busBw · 0.5). w: `sent_between_trees`.
    """
    g, d = group.members_max, group.domains
    latency_s = 2 * ((g - 1) * group.latency_s + math.ceil(math.log2(d)) * group.inter_latency_s)
    inside = size_bytes / group.chain_bytes_per_s if g > 1 else 0.0
    if d == 1:
        return AlphaBeta(latency_s, inside)
    sent_bytes = size_bytes * sent_between_trees(d)
    return AlphaBeta(latency_s, max(inside, sent_bytes / (group.members * group.inter_tree_bytes_per_s)))


def nvls_all_reduce(group: Group, size_bytes: float) -> AlphaBeta:
    """5α + S(1+1/n)/eB: the switch reduces and multicasts (NVLink SHARP) at the part e of the links' bandwidth.

    Each rank reads its n-th of S, which the switch has reduced (every GPU sends S in all), and writes it to all (S/n
    more). The steps are a barrier, request and answer of the read, the write, and a barrier.
    """
    bytes_per_s = group.ring_bytes_per_s * group.nvls_share
    return AlphaBeta(5 * group.latency_s, size_bytes * (1 + 1 / group.ranks) / bytes_per_s)


def nvls_all_gather(group: Group, size_bytes: float) -> AlphaBeta:
    """4α + S(n-1)/n / eB: each rank multicasts its n-th; a reduce-scatter reads instead, in as many steps."""
    bytes_per_s = group.ring_bytes_per_s * group.nvls_share
    return AlphaBeta(4 * group.latency_s, size_bytes * (group.ranks - 1) / group.ranks / bytes_per_s)


def nvls_tree_all_reduce(group: Group, size_bytes: float) -> AlphaBeta:
    """5α + 2⌈log2 d⌉α' + S·max((1+1/g)/eB, w/gb): NCCL's NVLSTree.

    The switch of each domain reduces, two trees run between the domains, and the switch multicasts. Each GPU's NICs
    carry the g-th of S that it reads; w as in a tree. The phases are pipelined, so the slower one decides
    (`ncclTopoTuneModel`, src/graph/tuning.cc, has the same minimum).
    """
    near = nvls_all_reduce(replace(group, ranks=group.members), size_bytes)
    far_latency_s = 2 * math.ceil(math.log2(group.domains)) * group.inter_latency_s
    between = min(group.inter_tree_bytes_per_s, group.inter_ring_bytes_per_s) * group.members
    sent_bytes = size_bytes * sent_between_trees(group.domains)
    return AlphaBeta(near.latency_s + far_latency_s, max(near.transfer_s, sent_bytes / between))


def nvls_sharp_all_reduce(group: Group, size_bytes: float) -> AlphaBeta:
    """5α + α' + S·max((1+1/g)/eB, 1/gb): the switches of the domains reduce, then those between them (SHARP).

    Each GPU's NICs send the g-th of S that it reads, and receive its sum over all domains, so every byte crosses them
    once (R. Graham et al., "Scalable Hierarchical Aggregation Protocol", 2016). NCCL runs both as its NVLS.
    """
    near = nvls_all_reduce(replace(group, ranks=group.members), size_bytes)
    between = _to_reducing_network(group, size_bytes)
    return AlphaBeta(near.latency_s + group.inter_latency_s, max(near.transfer_s, between))


def collnet_direct_all_reduce(group: Group, size_bytes: float) -> AlphaBeta:
    """2(min(1, g-1)α + 0.11(g-1)α) + α' + S·max(2(g-1)/g / B, 1/gb): NCCL's CollNetDirect.

    Every GPU sends each other one of its domain its part, the g-th of S. The network sums these parts, and every GPU
    sends its sum to the others. 0.11α: 0.4 of 3.7 µs for each peer (src/graph/tuning.cc).
    """
    g = group.members
    steps = 2 * (min(1, g - 1) + COLLNET_PEER_S / COLLNET_NVLINK_S * (g - 1))
    inside = 2 * size_bytes * (g - 1) / g / group.exchange_bytes_per_s
    latency_s = steps * group.latency_s + group.inter_latency_s
    return AlphaBeta(latency_s, max(inside, _to_reducing_network(group, size_bytes)))


def _to_reducing_network(group: Group, size_bytes: float) -> float:
    return size_bytes / (group.members * min(group.inter_tree_bytes_per_s, group.inter_ring_bytes_per_s))


def pat_all_gather(group: Group, size_bytes: float) -> AlphaBeta:
    """nα + ⌊log2 n⌋α'/3.5 + S/b: NCCL's parallel aggregated trees, one GPU a node; a reduce-scatter costs the same.

    Every rank sends 1, 2, 4, … blocks to the rank so far on (J. Bruck et al. 1997), in pieces (NCCL 2.28,
    `ncclTopoTuneModel`, src/graph/tuning.cc; S. Jeaugey, "PAT", 2025). NCCL counts S where (n-1)/n of it are sent.
    """
    latency_s = group.ranks * group.latency_s + math.floor(math.log2(group.ranks)) * group.inter_latency_s * PAT_SHOWS
    return AlphaBeta(latency_s, size_bytes / min(group.inter_tree_bytes_per_s, group.inter_ring_bytes_per_s))


def mesh_all_gather(group: Group, size_bytes: float) -> AlphaBeta:
    """α + S(n-1)/n / B: every rank sends its n-th directly to each other rank, over all its links at once.

    B is the bandwidth of the links to the other n-1 ranks together, so a message of S/n has one of them for itself. A
    reduce-scatter costs the same (R. Thakur 2005, section 4.1.3, "pairwise exchange", all exchanges at once).
    """
    return AlphaBeta(group.latency_s, size_bytes * (group.ranks - 1) / group.ranks / group.exchange_bytes_per_s)


def mesh_all_reduce(group: Group, size_bytes: float) -> AlphaBeta:
    """2α + 2S(n-1)/n / B: a reduce-scatter and an all-gather, each directly to every other rank."""
    return mesh_all_gather(group, size_bytes).twice()


def torus_all_gather(group: Group, size_bytes: float) -> AlphaBeta:
    """Σ⌊c/2⌋ α' + S(n-1)/n / b: rings along every axis of the torus at once, each on its part of S.

    c: the nodes on an axis (P. Sack, W. Gropp 2015). b: the bandwidth of the axes' links together. A reduce-scatter
    costs the same.
    """
    return AlphaBeta(group.torus_steps * group.inter_latency_s, ring_all_gather(group, size_bytes).transfer_s)


def torus_all_reduce(group: Group, size_bytes: float) -> AlphaBeta:
    """A reduce-scatter and an all-gather along every axis."""
    return torus_all_gather(group, size_bytes).twice()


def pairwise_exchange(group: Group, size_bytes: float) -> AlphaBeta:
    """⌈(n-1)/128⌉α + S(n-1)/n / B, per level and in parallel (Thakur 2005, section 4.3, with NCCL's rounds).

    Every rank of an all-to-all sends S/n to each other rank: inside its domain over NVLink, at the same time to others
    over its NIC, in rounds of `P2P_PER_ROUND`. If domains are unequal, the one with the fewest members sends most
    outside. A gather or scatter takes as long: the root's links are the limit.
    """
    block = size_bytes / group.ranks
    near, far = group.members_max - 1, group.ranks - group.members
    near_s = near * block / group.exchange_bytes_per_s
    far_s = far * block / group.inter_exchange_bytes_per_s
    near_latency_s = math.ceil(near / P2P_PER_ROUND) * group.latency_s
    far_latency_s = math.ceil(far / P2P_PER_ROUND) * group.inter_latency_s
    return AlphaBeta(max(near_latency_s, far_latency_s), max(near_s, far_s))


def direct_send_recv(group: Group, size_bytes: float) -> AlphaBeta:
    """α + S/B: every rank sends S to the next; the slowest pair decides."""
    if group.domains == 1:
        return AlphaBeta(group.latency_s, size_bytes / group.pair_bytes_per_s)
    slowest = min(group.inter_pair_bytes_per_s, group.pair_bytes_per_s)
    if group.members_max == 1:
        slowest = group.inter_pair_bytes_per_s
    return AlphaBeta(group.inter_latency_s, size_bytes / slowest)


_GATHERS: Mapping[str, Algorithm] = {
    "ring": ring_all_gather,
    "nvls": nvls_all_gather,
    "pat": pat_all_gather,
    "mesh": mesh_all_gather,
    "torus": torus_all_gather,
}
ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = {
    "all_reduce": {
        "ring": ring_all_reduce,
        "tree": tree_all_reduce,
        "nvls": nvls_all_reduce,
        "nvls_tree": nvls_tree_all_reduce,
        "nvls_sharp": nvls_sharp_all_reduce,
        "collnet_direct": collnet_direct_all_reduce,
        "mesh": mesh_all_reduce,
        "torus": torus_all_reduce,
    },
    "all_gather": _GATHERS,
    "reduce_scatter": _GATHERS,
    "broadcast": {"ring": ring_broadcast},
    "reduce": {"ring": ring_broadcast},
    "all_to_all": {"pairwise": pairwise_exchange},
    "gather": {"direct": pairwise_exchange},
    "scatter": {"direct": pairwise_exchange},
    "send_recv": {"direct": direct_send_recv},
}
"""The algorithms of each collective. Of those that a group can run (`algorithms.TRAITS`), `choose` takes the fastest.

`mesh` and `torus` are not NCCL's. The first is used by libraries for chips with a link between every two (RCCL's direct
all-gather and its all-pairs kernels), the second by compilers for a torus.
"""


def message_protocol(timing: Timing, between_domains: bool, size_bytes: float) -> Protocol:
    """Return LL for a message of up to 16 KiB a channel inside a domain, otherwise Simple (`addP2pToPlan`, enqueue.cc).

    In NCCL 2.29 a message gets a channel for each 64 KiB, so above 16 KiB it uses Simple; 2.27 counts all channels that
    the message might get. Between nodes there are no buffers for LL (NCCL_ALLOC_P2P_NET_LL_BUFFERS is 0 by default;
    `sendProxyConnect`, src/transport/net.cc).
    """
    return LL if not between_domains and size_bytes <= timing.message_ll_bytes else SIMPLE


class Choice(NamedTuple):
    """Hold the algorithm and protocol that NCCL chooses for one collective; the protocol is None on hosts without NCCL.

    >>> from topology.protocols import LL128
    >>> str(Choice("ring", LL128)), str(Choice("ring"))
    ('ring LL128', 'ring')
    """

    algorithm: str
    protocol: Protocol | None = None

    def __str__(self) -> str:
        return f"{self.algorithm} {self.protocol.name}" if self.protocol else self.algorithm


def choose(kind: str, group: Group, size_bytes: float) -> Choice:
    """Return the algorithm and protocol that are fastest by NCCL's own cost model.

    NCCL has no such model for sends and receives; `message_protocol` has its rule.

    Raises:
        ValueError: for an unknown kind.
    """
    if kind not in ALGORITHMS:
        raise ValueError(f"collective is {kind!r}; it must be one of {', '.join(sorted(ALGORITHMS))}")
    if KINDS[kind].messages and group.protocols:
        (name,) = ALGORITHMS[kind]
        size = size_bytes / group.ranks if KINDS[kind].exchanges else size_bytes
        return Choice(name, message_protocol(group.timing, group.domains > 1, size))
    best, least_s = None, math.inf
    gathers = "pat" in ALGORITHMS[kind]
    for name, algorithm in ALGORITHMS[kind].items():
        if not TRAITS[name].usable(group, size_bytes):
            continue
        for estimate in TRAITS[name].estimates(group, gathers) if group.protocols else PLAIN:
            stepped = group.stepped(estimate.step, estimate.inter_step)
            cost = algorithm(stepped, size_bytes)
            start_s = estimate.base * group.latency_s - _uncounted_s(TRAITS[name], stepped)
            seconds = start_s + cost.latency_s + cost.transfer_s / estimate.bandwidth
            if best is None or seconds < least_s:
                best, least_s = Choice(name, estimate.protocol), seconds
    assert best is not None
    return best


def _uncounted_s(traits: Traits, group: Group) -> float:
    """Return the seconds of a tree's last level between d domains, which NCCL's model leaves out: it has ⌊log2 d⌋
    (`log2i`, src/graph/tuning.cc), a tree ⌈log2 d⌉."""
    if not group.protocols or not traits.trees_between:
        return 0.0
    levels = math.log2(group.domains)
    return 2 * (math.ceil(levels) - math.floor(levels)) * group.inter_latency_s
