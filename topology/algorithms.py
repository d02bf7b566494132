"""Hold the facts of collective algorithms beside their times: who can run one, its protocols, and what each rank sends.

An algorithm is a record here, a closed form in `collectives` and the time of its protocols in `durations`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from topology.collective_kinds import KINDS, bus_factor, sent_between_trees
from topology.protocols import COLLNET, NVLS, NVLS_SHARP, PAT, PLAIN, RING, RING_ALONE, RING_BESIDE_PAT, TREE, Estimate

if TYPE_CHECKING:
    from topology.group import Group

# The part of the bytes between domains that goes above the leaf switches. Of a ring's domains under one leaf only the
# last sends there; of an exchange, what leaves the leaf; all bytes of trees and shifts.
Crossing = Literal["ring", "exchange", "all"]


class Traits(Struct, frozen=True):
    """Hold the facts of one algorithm.

    `sent_bytes`: from the collective's kind, the group and the size, the bytes that a member sends inside its domain
    and through its share of the NICs. `usable`: whether a group can run the algorithm at a size. `beside_pat`: what
    NCCL's newer releases assume where they consider PAT, if it differs from `protocols`. `alone`: what older ones do
    with one GPU of each node, if it differs. `trees_between`: trees join the domains; NCCL's cost model leaves out
    their last level.
    """

    sent_bytes: Callable[[str, Group, float], tuple[float, float]]
    crossing: Crossing = "all"
    protocols: tuple[Estimate, ...] = PLAIN
    usable: Callable[[Group, float], bool] = lambda group, size_bytes: True
    beside_pat: tuple[Estimate, ...] = ()
    alone: tuple[Estimate, ...] = ()
    trees_between: bool = False

    def estimates(self, group: Group, gathers: bool) -> tuple[Estimate, ...]:
        """Return what NCCL assumes of each protocol. `gathers`: of a collective that PAT may be considered for."""
        if group.pat and gathers and self.beside_pat:
            return self.beside_pat
        return self.alone if group.alone_before_pat and self.alone else self.protocols


def _around(kind: str, group: Group, size_bytes: float) -> tuple[float, float]:
    """All bytes pass a ring: twice in an all-reduce, once in a broadcast."""
    n, near = group.ranks, group.members_max
    sent = size_bytes * bus_factor(kind, n)
    return (sent * (near - 1) / near, sent / group.members) if group.domains > 1 else (sent, 0.0)


def _between_trees(group: Group, size_bytes: float) -> float:
    return size_bytes * sent_between_trees(group.domains) / group.members


def _along_trees(kind: str, group: Group, size_bytes: float) -> tuple[float, float]:
    between = _between_trees(group, size_bytes) if group.domains > 1 else 0.0
    return 2 * size_bytes if group.members_max > 1 else 0.0, between


def _to_switch(kind: str, group: Group, size_bytes: float) -> tuple[float, float]:
    n = group.ranks
    return size_bytes * (1 + 1 / n if kind == "all_reduce" else (n - 1) / n), 0.0


def _to_switch_and_trees(kind: str, group: Group, size_bytes: float) -> tuple[float, float]:
    return size_bytes * (1 + 1 / group.members), _between_trees(group, size_bytes)


def _to_both_switches(kind: str, group: Group, size_bytes: float) -> tuple[float, float]:
    return size_bytes * (1 + 1 / group.members), size_bytes / group.members


def _to_heads(kind: str, group: Group, size_bytes: float) -> tuple[float, float]:
    """To each GPU of the domain its part, and the own part's sum to all; that part goes to the network once."""
    return 2 * size_bytes * (group.members - 1) / group.members, size_bytes / group.members


def _to_each(kind: str, group: Group, size_bytes: float) -> tuple[float, float]:
    n = group.ranks
    far = (n - group.members) * size_bytes / n if group.domains > 1 else 0.0
    return (group.members_max - 1) * size_bytes / n, far


def _directly(kind: str, group: Group, size_bytes: float) -> tuple[float, float]:
    if KINDS[kind].exchanges:
        return _to_each(kind, group, size_bytes)
    far = size_bytes / max(1.0, group.members / group.nics) if group.domains > 1 else 0.0
    return size_bytes if group.members_max > 1 else 0.0, far


TRAITS: Mapping[str, Traits] = {
    "ring": Traits(_around, "ring", RING, beside_pat=RING_BESIDE_PAT, alone=RING_ALONE),
    "pat": Traits(_around, protocols=PAT, usable=lambda group, _: group.pat),
    # The hops of a tree on a torus would pass several links.
    "tree": Traits(_along_trees, protocols=TREE, usable=lambda group, _: group.torus_steps == 0, trees_between=True),
    # The switch must reduce, and all GPUs must be at it.
    "nvls": Traits(_to_switch, protocols=NVLS, usable=lambda group, _: group.nvls_share > 0 and group.domains == 1),
    "nvls_tree": Traits(
        _to_switch_and_trees,
        protocols=NVLS,
        usable=lambda group, size_bytes: group.domains > 1 and size_bytes >= group.nvls_tree_bytes,
        trees_between=True,
    ),
    # More than two GPUs of a domain share its switch (`ncclNvlsInit`, src/transport/nvls.cc).
    "nvls_sharp": Traits(
        _to_both_switches,
        protocols=NVLS_SHARP,
        usable=lambda group, _: group.sharp and group.nvls_share > 0 and group.members > 2,
    ),
    "collnet_direct": Traits(_to_heads, protocols=COLLNET, usable=lambda group, _: group.sharp and group.switched),
    "mesh": Traits(_around, protocols=RING, usable=lambda group, _: group.sends_directly and group.domains == 1),
    "torus": Traits(_around, usable=lambda group, _: group.torus_steps > 0),
    "pairwise": Traits(_to_each, "exchange"),
    "direct": Traits(_directly),
}
"""All algorithms of `collectives.ALGORITHMS`."""
