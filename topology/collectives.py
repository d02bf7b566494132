"""Closed forms of collective times: α–β per level, one function per algorithm. Pure.

A group of n ranks lies in d domains (a domain: the GPUs that share NVLink, or one PCIe host) with g members
in each. S is the size as nccl-tests counts it: the whole buffer (the gathered output of an all-gather, the
input of a reduce-scatter, what each rank holds for an all-to-all). B is what one GPU sends over its links
inside the domain, b what it sends through its share of the NICs; bandwidths are those of the link, with no
efficiency factor. α is one step inside a domain, α' one step between domains.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
2005 (α–β costs of ring and pairwise algorithms); P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009 (the ring's 2(n-1)/n is optimal); P. Sanders, J. Speck,
J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009, and NCCL 2.4
(double binary trees); NCCL's cost model, src/graph/tuning.cc (which steps cross nodes, chains inside them);
nccl-tests, doc/PERFORMANCE.md (bus bandwidth).

The functions give bare α–β; `choose` adds the protocols (see `protocols`) on links that NCCL runs on, and picks as
NCCL does; `durations` tells what the choice then takes. Left out: in-network reduction between nodes (CollNet,
SHARP), PAT, NCCL's limits per channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from topology.protocols import PLAIN, PROTOCOLS
from topology.timing import Fabric, Timing

P2P_PER_ROUND = 8 * 16
"""Sends in flight at once: 8 a channel (NCCL_MAX_DEV_WORK_P2P_PER_BATCH, src/include/device.h), each next 8 on the next
channel (`ncclP2pChannelBaseForRound`, src/include/channel.h) of 16."""


class Group(Struct, frozen=True, dict=True):
    """Where a group's ranks lie and what each may send: all that a closed form needs to know.

    Bandwidths are bytes/s of one GPU and direction; the `inter_` ones are its share of the node's NICs while
    all GPUs of the node do the same, after oversubscription or a torus's hops.
    """

    ranks: int
    domains: int
    members: int  # in the domain with the fewest
    members_max: int
    ring_bytes_per_s: float  # inside a domain, in rings over the members
    chain_bytes_per_s: float  # all-reduce along chains, bytes of S per second: half of the ring's on a switch
    exchange_bytes_per_s: float  # inside a domain, to all members at once
    pair_bytes_per_s: float  # inside a domain, to the next rank alone
    latency_s: float
    inter_ring_bytes_per_s: float
    inter_tree_bytes_per_s: float
    inter_exchange_bytes_per_s: float
    inter_pair_bytes_per_s: float
    inter_latency_s: float
    nics: float  # of the domain with the fewest members, those that its members own together, at least one
    nvls_share: float  # of the ring's bandwidth, under in-switch reduction; 0: the switch has none
    nvls_tree_bytes: float  # from this size on NCCL considers NVLS with trees between domains; inf: never
    protocols: bool  # NCCL's apply
    timing: Timing  # what its machine takes, for `durations`
    fabric: Fabric
    # Every two GPUs of a domain are linked, and the library sends straight over these links.
    sends_directly: bool = False
    torus_steps: int = 0  # of rings along all axes of a torus, one pass; 0: no torus

    @cached_property
    def _kept(self) -> dict[tuple[str, float, float], Group]:
        """Changed forms of this group, kept for messages of other sizes."""
        return {}

    def stepped(self, near: float, far: float) -> Group:
        """The group with latencies that many times as long, inside domains and between them; kept for other sizes."""
        key = ("stepped", near, far)
        if key not in self._kept:
            latency_s, inter_latency_s = self.latency_s * near, self.inter_latency_s * far
            self._kept[key] = replace(self, latency_s=latency_s, inter_latency_s=inter_latency_s)
        return self._kept[key]

    def sustained(self, near: float, far: float) -> Group:
        """The group with these shares of its bandwidths, inside domains and in rings between them; kept, too."""
        key = ("sustained", near, far)
        if key not in self._kept:
            self._kept[key] = replace(
                self,
                ring_bytes_per_s=self.ring_bytes_per_s * near,
                chain_bytes_per_s=self.chain_bytes_per_s * near,
                exchange_bytes_per_s=self.exchange_bytes_per_s * near,
                inter_ring_bytes_per_s=self.inter_ring_bytes_per_s * far,
            )
        return self._kept[key]

    @property
    def nodes_share_bytes_per_s(self) -> float:
        """Bandwidth with which a domain's members together send to the next domain of a ring."""
        return self.members * self.inter_ring_bytes_per_s


class AlphaBeta(Struct, frozen=True):
    """Seconds of one algorithm: `latency_s` of its steps, and `transfer_s` proportional to the size."""

    latency_s: float
    transfer_s: float

    @property
    def seconds(self) -> float:
        return self.latency_s + self.transfer_s


Algorithm = Callable[[Group, float], AlphaBeta]


def _ring_pass(group: Group, sent_bytes: float) -> float:
    """Seconds in which every rank hands `sent_bytes` to its successor.

    NCCL lays one ring per NIC, each leaving the node at another GPU. Of a GPU's g rings g-1 stay on NVLink
    and one leaves, so NVLink carries (g-1)/g of what it sends, and the node's boundary is passed by
    `sent_bytes` once, through the NICs of all members together.
    """
    if group.domains == 1:
        return sent_bytes / group.ring_bytes_per_s
    inside = sent_bytes * (group.members_max - 1) / group.members_max / group.ring_bytes_per_s
    return max(inside, sent_bytes / group.nodes_share_bytes_per_s)


def _ring_latency(group: Group, passes: int) -> float:
    """`passes` rounds of n-1 steps. The ring has d hops between domains (two for two domains: there and back), and
    a block passes all n hops but one, so the last blocks to arrive have crossed all d. (NCCL's own estimate,
    nInterSteps, counts d-1.)"""
    inter_steps = 0 if group.domains == 1 else min(group.domains, group.ranks - 1)
    inter_hops = max(inter_steps, group.torus_steps)  # a step between places of a torus that are far apart is several
    return passes * ((group.ranks - 1 - inter_steps) * group.latency_s + inter_hops * group.inter_latency_s)


def ring_all_gather(group: Group, size_bytes: float) -> AlphaBeta:
    """(n-1)α + S(n-1)/n / B (Thakur 2005, section 4.1); a reduce-scatter costs the same."""
    sent_bytes = size_bytes * (group.ranks - 1) / group.ranks
    return AlphaBeta(_ring_latency(group, 1), _ring_pass(group, sent_bytes))


def ring_all_reduce(group: Group, size_bytes: float) -> AlphaBeta:
    """2(n-1)α + 2S(n-1)/n / B: reduce-scatter, then all-gather (Patarasuk & Yuan 2009)."""
    half = ring_all_gather(group, size_bytes)
    return AlphaBeta(2 * half.latency_s, 2 * half.transfer_s)


def ring_broadcast(group: Group, size_bytes: float) -> AlphaBeta:
    """(n-1)α + S/B: a pipeline along the ring (NCCL); a reduce is the same backwards."""
    return AlphaBeta(_ring_latency(group, 1), _ring_pass(group, size_bytes))


def tree_all_reduce(group: Group, size_bytes: float) -> AlphaBeta:
    """Double binary tree over the domains, a chain inside each (NCCL 2.4).

    2((g-1)α + ⌈log2 d⌉α') + max(S/C, wS / gb). A GPU inside a chain passes S up and S down, so C is half of B
    (NCCL's busBw · 0.5). Each of the two trees carries S/2 up and down; an inner node of one is a leaf of the
    other, so a domain sends S up and S down in all: w = 2. Of two domains each is the other's only neighbour,
    root of one tree and leaf of the other: S/2 up one and S/2 down the other, w = 1.
    """
    g, d = group.members_max, group.domains
    latency_s = 2 * ((g - 1) * group.latency_s + math.ceil(math.log2(d)) * group.inter_latency_s)
    inside = size_bytes / group.chain_bytes_per_s if g > 1 else 0.0
    if d == 1:
        return AlphaBeta(latency_s, inside)
    sent_bytes = size_bytes * (1 if d == 2 else 2)
    return AlphaBeta(latency_s, max(inside, sent_bytes / (group.members * group.inter_tree_bytes_per_s)))


def nvls_all_reduce(group: Group, size_bytes: float) -> AlphaBeta:
    """5α + S(1+1/n)/eB: the switch reduces and multicasts (NVLink SHARP) at e of the links' bandwidth.

    Each rank reads its n-th already reduced by the switch (every GPU sends S in all) and writes it to all
    (S/n more). Steps: a barrier, the read's two ways, the write, a barrier.
    """
    bytes_per_s = group.ring_bytes_per_s * group.nvls_share
    return AlphaBeta(5 * group.latency_s, size_bytes * (1 + 1 / group.ranks) / bytes_per_s)


def nvls_all_gather(group: Group, size_bytes: float) -> AlphaBeta:
    """4α + S(n-1)/n / eB: each rank multicasts its n-th; a reduce-scatter reads instead, in as many steps."""
    bytes_per_s = group.ring_bytes_per_s * group.nvls_share
    return AlphaBeta(4 * group.latency_s, size_bytes * (group.ranks - 1) / group.ranks / bytes_per_s)


def nvls_tree_all_reduce(group: Group, size_bytes: float) -> AlphaBeta:
    """5α + 2⌈log2 d⌉α' + S·max((1+1/g)/eB, w/gb): the switch of each domain reduces, two trees run between the domains,
    the switch multicasts (NCCL's NVLSTree). Each GPU's NICs carry the n-th that it reads; w as in a tree. The phases
    are pipelined, so the slower one decides (`ncclTopoTuneModel`, src/graph/tuning.cc, has the same minimum).
    """
    near = nvls_all_reduce(replace(group, ranks=group.members), size_bytes)
    far_latency_s = 2 * math.ceil(math.log2(group.domains)) * group.inter_latency_s
    between = min(group.inter_tree_bytes_per_s, group.inter_ring_bytes_per_s) * group.members
    sent_bytes = size_bytes * (1 if group.domains == 2 else 2)
    return AlphaBeta(near.latency_s + far_latency_s, max(near.transfer_s, sent_bytes / between))


def mesh_all_gather(group: Group, size_bytes: float) -> AlphaBeta:
    """α + S(n-1)/n / B: every rank sends its n-th straight to each other, over all its links at once.

    B is what the links to the other n-1 carry together, so a message of S/n has one of them for itself. A
    reduce-scatter costs the same (R. Thakur 2005, section 4.1.3, "pairwise exchange", all exchanges at once).
    """
    return AlphaBeta(group.latency_s, size_bytes * (group.ranks - 1) / group.ranks / group.exchange_bytes_per_s)


def mesh_all_reduce(group: Group, size_bytes: float) -> AlphaBeta:
    """2α + 2S(n-1)/n / B: a reduce-scatter and an all-gather, each straight to every other rank."""
    half = mesh_all_gather(group, size_bytes)
    return AlphaBeta(2 * half.latency_s, 2 * half.transfer_s)


def torus_all_gather(group: Group, size_bytes: float) -> AlphaBeta:
    """Σ⌊c/2⌋ α' + S(n-1)/n / b: rings along every axis of the torus, each on its part of S, all at once; c: nodes
    on an axis (P. Sack, W. Gropp 2015). b is what the axes' links carry together; a reduce-scatter costs the same."""
    return AlphaBeta(group.torus_steps * group.inter_latency_s, ring_all_gather(group, size_bytes).transfer_s)


def torus_all_reduce(group: Group, size_bytes: float) -> AlphaBeta:
    """A reduce-scatter and an all-gather along every axis."""
    half = torus_all_gather(group, size_bytes)
    return AlphaBeta(2 * half.latency_s, 2 * half.transfer_s)


def hierarchical_all_reduce(group: Group, size_bytes: float) -> AlphaBeta:
    """Reduce-scatter inside the domain, all-reduce of S/g among d peers over each rail, all-gather inside.

    2((g-1)α + (d-1)α') + 2S(g-1)/g / B + 2(S/g)(d-1)/d / b, one phase after the other. Not NCCL's own (its
    NVLSTree overlaps the phases): what frameworks do with two communicators.
    """
    g, d = group.members_max, group.domains
    latency_s = 2 * ((g - 1) * group.latency_s + (d - 1) * group.inter_latency_s)
    inside = 2 * size_bytes * (g - 1) / g / group.ring_bytes_per_s
    between = 2 * size_bytes / g * (d - 1) / d / group.inter_ring_bytes_per_s if d > 1 else 0.0
    return AlphaBeta(latency_s, inside + between)


def _exchange(group: Group, size_bytes: float) -> AlphaBeta:
    """A rank sends S/n to each other: those of its domain over NVLink, beside it the others over its NIC.

    Sends go out in rounds of `P2P_PER_ROUND`. Of unequal domains the one with the fewest members sends most outside.
    """
    block = size_bytes / group.ranks
    near, far = group.members_max - 1, group.ranks - group.members
    near_s = near * block / group.exchange_bytes_per_s
    far_s = far * block / group.inter_exchange_bytes_per_s
    near_latency_s = math.ceil(near / P2P_PER_ROUND) * group.latency_s
    far_latency_s = math.ceil(far / P2P_PER_ROUND) * group.inter_latency_s
    return AlphaBeta(max(near_latency_s, far_latency_s), max(near_s, far_s))


def pairwise_all_to_all(group: Group, size_bytes: float) -> AlphaBeta:
    """⌈(n-1)/128⌉α + S(n-1)/n / B, per level and in parallel (Thakur 2005, section 4.3, with NCCL's rounds)."""
    return _exchange(group, size_bytes)


def direct_gather(group: Group, size_bytes: float) -> AlphaBeta:
    """Every rank sends its n-th straight to the root, whose links are the limit; a scatter is the reverse."""
    return _exchange(group, size_bytes)


def direct_send_recv(group: Group, size_bytes: float) -> AlphaBeta:
    """α + S/B: every rank sends S to the next; the slowest pair decides."""
    if group.domains == 1:
        return AlphaBeta(group.latency_s, size_bytes / group.pair_bytes_per_s)
    slowest = min(group.inter_pair_bytes_per_s, group.pair_bytes_per_s)
    if group.members_max == 1:
        slowest = group.inter_pair_bytes_per_s
    return AlphaBeta(group.inter_latency_s, size_bytes / slowest)


ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = {
    "all_reduce": {
        "ring": ring_all_reduce,
        "tree": tree_all_reduce,
        "nvls": nvls_all_reduce,
        "nvls_tree": nvls_tree_all_reduce,
        "mesh": mesh_all_reduce,
        "torus": torus_all_reduce,
    },
    "all_gather": {
        "ring": ring_all_gather,
        "nvls": nvls_all_gather,
        "mesh": mesh_all_gather,
        "torus": torus_all_gather,
    },
    "reduce_scatter": {
        "ring": ring_all_gather,
        "nvls": nvls_all_gather,
        "mesh": mesh_all_gather,
        "torus": torus_all_gather,
    },
    "broadcast": {"ring": ring_broadcast},
    "reduce": {"ring": ring_broadcast},
    "all_to_all": {"pairwise": pairwise_all_to_all},
    "gather": {"direct": direct_gather},
    "scatter": {"direct": direct_gather},
    "send_recv": {"direct": direct_send_recv},
}
"""What is considered for each collective; the fastest is taken, of those that the group can run (`_usable`).

`mesh` and `torus` are not NCCL's: the first is what libraries of chips do that are linked one to one (RCCL's direct
all-gather and its all-pairs kernels), the second what a compiler lays on a torus.
"""


MESSAGES = ("all_to_all", "gather", "scatter", "send_recv")
"""Grouped sends and receives to NCCL, which it does not choose algorithms for."""


def message_protocol(timing: Timing, between_domains: bool, size_bytes: float) -> str:
    """LL for a message of up to 16 KiB a channel inside a domain, else Simple: `addP2pToPlan`, src/enqueue.cc.

    In NCCL 2.29 a message has a channel for each 64 KiB, so from 16 KiB on it is Simple; in 2.27 all channels that it
    might have counted. Between nodes there are no buffers for LL (NCCL_ALLOC_P2P_NET_LL_BUFFERS is 0 by default;
    `sendProxyConnect`, src/transport/net.cc).
    """
    return "LL" if not between_domains and size_bytes <= timing.message_ll_bytes else "Simple"


def bus_factor(kind: str, ranks: int) -> float:
    """Bus bandwidth is size/time times this (nccl-tests, PERFORMANCE.md).

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    if kind in ("broadcast", "reduce", "send_recv"):
        return 1.0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


class Choice(NamedTuple):
    """The algorithm and protocol that NCCL chooses for one collective; the protocol is "" on hosts without NCCL.

    >>> str(Choice("ring", "LL128")), str(Choice("ring"))
    ('ring LL128', 'ring')
    """

    algorithm: str
    protocol: str = ""

    def __str__(self) -> str:
        return f"{self.algorithm} {self.protocol}".rstrip()


def choose(kind: str, group: Group, size_bytes: float) -> Choice:
    """The algorithm and protocol that NCCL's own model finds quickest.

    Sends and receives have no model but a rule: see `message_protocol`.
    Raises `ValueError` for an unknown kind.
    """
    if kind not in ALGORITHMS:
        raise ValueError(f"collective is {kind!r}; it must be one of {', '.join(sorted(ALGORITHMS))}")
    if kind in MESSAGES and group.protocols:
        (name,) = ALGORITHMS[kind]
        size = size_bytes if kind == "send_recv" else size_bytes / group.ranks
        return Choice(name, message_protocol(group.timing, group.domains > 1, size))
    best, least_s = None, math.inf
    for name, algorithm in ALGORITHMS[kind].items():
        if not _usable(name, group, size_bytes):
            continue
        for protocol in PROTOCOLS[name] if group.protocols else PLAIN:
            cost = algorithm(group.stepped(protocol.step, protocol.inter_step), size_bytes)
            start_s = protocol.base * group.latency_s
            seconds = start_s + cost.latency_s + cost.transfer_s / protocol.bandwidth
            if best is None or seconds < least_s:
                best, least_s = Choice(name, protocol.name), seconds
    assert best is not None
    return best


def _usable(algorithm: str, group: Group, size_bytes: float) -> bool:
    """NVLS needs a switch that reduces, and one domain; its trees what `Network` says of domains and size; a mesh one
    domain of links from each to each. Trees' hops would pass several links of a torus, so none runs there."""
    if algorithm == "nvls":
        return group.nvls_share > 0 and group.domains == 1
    if algorithm == "mesh":
        return group.sends_directly and group.domains == 1
    if algorithm in ("torus", "tree"):
        return (group.torus_steps > 0) == (algorithm == "torus")
    return algorithm != "nvls_tree" or (group.domains > 1 and size_bytes >= group.nvls_tree_bytes)
