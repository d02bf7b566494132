"""Where groups of ranks lie on nodes, NVLink domains and leaf switches, as far as prices depend on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from sim.core.columns import Ints
from sim.inputs.scenario import Scenario
from topology.network import Network
from topology.shares import crossings
from topology.spec import ClusterSpec


def aligned(scenario: Scenario) -> bool:
    """Tell whether all groups of one dimension surely cover nodes, NVLink domains and leaves in the same way.

    They do if each node, domain and leaf ends where a dimension of the mesh ends, or cuts it into equal parts, and no
    group is a part of a dimension; or if all sizes are powers of two (groups are then cosets of bits).
    """
    p, cluster, intra = scenario.parallelism, scenario.cluster, scenario.cluster.intra_node
    if cluster.topology is not None or cluster.inter_node.is_torus or (intra.meshed and not intra.all_linked):
        return False
    bounds = [b for b in (cluster.gpus_per_node, cluster.domain_gpus, _leaf_span(cluster)) if 1 < b < p.ranks]
    sizes = [getattr(p, d) for d in p.rank_order.split("-")]
    cuts = [p.shard_size, p.ep, p.expert_tp, p.cp_exchanged, p.zero_hpz_partition_size or 1]
    if all(n & (n - 1) == 0 for n in (*sizes, *bounds, *cuts)):
        return True
    if p.shard_size != p.dp * p.cp or scenario.model.moe is not None or p.cp_exchanged > 1:
        return False
    strides = [math.prod(sizes[:i]) for i in range(len(sizes) + 1)]
    return all(any(b % s == 0 == t % b for s, t in pairwise(strides)) for b in bounds)


def _leaf_span(cluster: ClusterSpec) -> int:
    """GPUs under one leaf switch; 1 if nothing depends on it."""
    inter = cluster.inter_node
    return cluster.gpus_per_node * inter.nodes_per_leaf if inter.oversubscription > 1.0 else 1


def period_of(cluster: ClusterSpec) -> int:
    """The distance between ranks that have the same places in their nodes, domains and leaves.

    0 where there is none: in a torus, or in a network of the user's own.
    """
    if cluster.topology is not None or cluster.inter_node.is_torus:
        return 0
    return math.lcm(cluster.gpus_per_node, cluster.domain_gpus, _leaf_span(cluster))


class GroupLocations:
    """Number groups and messages by their places on the network: equal numbers have equal prices and link loads.

    A price alone would not tell them apart: two routes may cost the same, and only one of them leads above the leaves.
    """

    def __init__(self, cluster: ClusterSpec, network: Network, faulty_nodes: Iterable[int]) -> None:
        self.cluster, self.network = cluster, network
        self.faulty = np.array(sorted(faulty_nodes), dtype=np.int64)
        self.period = period_of(cluster)

    def of_ranks(self, ranks: Ints) -> Ints:
        """A number for each rank: what is left of its own links, which its communications share."""
        if self.cluster.topology is not None or self.network.nics_differ:
            numbers: dict[object, int] = {}
            own = [tuple(self.network.own_links_left(rank).items()) for rank in ranks.tolist()]
            return np.array([numbers.setdefault(left, len(numbers)) for left in own], dtype=np.int64)
        nodes, number = np.unique(ranks // self.cluster.gpus_per_node, return_inverse=True)
        inside = [self.network.left_inside(n * self.cluster.gpus_per_node) for n in nodes.tolist()]
        return np.unique(inside, return_inverse=True)[1][number]

    def of_groups(self, table: Ints) -> Ints:
        """Number groups by their places; `table`: a row of ranks for each group."""
        return self._numbers(table, lambda r: (self.network.group(r), self._together(r), crossings(self.network, r)))

    def of_messages(self, sources: Ints, targets: Ints) -> Ints:
        """Number messages by the places of their senders and receivers."""
        per_node = self.cluster.gpus_per_node
        return self._numbers(
            np.stack([sources, targets], axis=1),
            lambda r: (self.network.path(*r), r[0] // per_node == r[1] // per_node, crossings(self.network, r)),
        )

    def _numbers(self, table: Ints, key_of: Callable[[tuple[int, ...]], object]) -> Ints:
        """Number the rows of `table`, each the ranks of one group or message, by `key_of`.

        Rows that differ by whole periods have equal places, unless they touch a node with a fault. So all other rows
        are first moved, by whole periods, to the first period beyond these nodes.
        """
        if self.period:
            per_node, table = self.cluster.gpus_per_node, table.copy()
            here = ~np.isin(table // per_node, self.faulty).any(axis=1)
            beyond = (int(self.faulty.max(initial=-1)) + 1) * per_node
            table[here] += -(-beyond // self.period) * self.period - table[here, :1] // self.period * self.period
        different, number = np.unique(table, axis=0, return_inverse=True)
        keys: dict[object, int] = {}
        ids = [keys.setdefault(key_of(tuple(row)), len(keys)) for row in different.tolist()]
        return np.array(ids, dtype=np.int64)[number.reshape(-1)]

    def _together(self, ranks: tuple[int, ...]) -> int:
        """Return how many share the first one's node, which decides about measured collectives."""
        per_node = self.cluster.gpus_per_node
        return sum(r // per_node == ranks[0] // per_node for r in ranks)
