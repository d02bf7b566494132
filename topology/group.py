"""A group of ranks as collectives see it: where its members lie, and what each may send."""

from __future__ import annotations

from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from topology.protocols import SIMPLE_NETWORK_S
from topology.timing import Fabric, Timing


class Leaves(Struct, frozen=True):
    """Hold which parts of a group's bytes between domains go above the leaf switches.

    `ring`: of a ring's k domains under one leaf only the last sends above it, so 1/k. `exchange`: what leaves the leaf.
    Both are of the leaf that sends the largest part.
    """

    ring: float
    exchange: float


class Group(Struct, frozen=True, dict=True):
    """Hold where a group's ranks lie and what each may send: the input of a closed form.

    Bandwidths are bytes/s of one GPU and direction. The `inter_` ones are its share of the node's NICs while all GPUs
    of the node do the same, after oversubscription or a torus's hops.
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
    nics: float  # that the members of the smallest domain own together, at least one
    nvls_share: float  # part of the ring's bandwidth under in-switch reduction; 0: the switch cannot reduce
    nvls_tree_bytes: float  # from this size on NCCL considers NVLS with trees between domains; inf: never
    protocols: bool  # whether NCCL's apply
    timing: Timing  # of its machine, for `durations`
    fabric: Fabric
    switched: bool = True  # whether switches join the GPUs of a domain
    # Whether every two GPUs of a domain are linked and the library sends directly over these links.
    sends_directly: bool = False
    # Parts of a GPU's links that an exchange and a pair use inside a domain; less than 1 on a mesh.
    exchange_links: float = 1.0
    pair_links: float = 1.0
    leaves: Leaves | None = None  # None: there is as much bandwidth above the leaf switches, or one leaf
    sharp: bool = False  # whether the switches between domains reduce for this group
    pat: bool = False  # whether NCCL may run an all-gather and a reduce-scatter over parallel trees (PAT)
    alone_before_pat: bool = False  # whether NCCL is older than PAT, and the group has one GPU of each node
    torus_steps: int = 0  # steps of one pass of rings along all axes of a torus; 0: no torus

    @cached_property
    def _kept(self) -> dict[tuple[str, float, float], Group]:
        """Variants of this group, cached for messages of other sizes."""
        return {}

    def stepped(self, near: float, far: float) -> Group:
        """Return the group with its latencies inside domains times `near` and between them times `far`; cached.

        By how much a network's latency exceeds the usual one is added to a step of any protocol, as NCCL does with the
        latency that a plugin states (`latencyInter` in `ncclTopoTuneModel`, src/graph/tuning.cc).
        """
        key = ("stepped", near, far)
        if key not in self._kept:
            usual_s = min(self.inter_latency_s, SIMPLE_NETWORK_S)
            inter_latency_s = usual_s * far + self.inter_latency_s - usual_s
            self._kept[key] = replace(self, latency_s=self.latency_s * near, inter_latency_s=inter_latency_s)
        return self._kept[key]

    def sustained(self, near: float, far: float) -> Group:
        """Return the group with bandwidths inside domains times `near` in rings between them times `far`; cached."""
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
        """Bandwidth at which a domain's members together send to the next domain of a ring."""
        return self.members * self.inter_ring_bytes_per_s
