"""Replace the one task of a collective by its messages: the steps of a ring, a tree, an exchange or a mesh.

Each member has a task that begins its part and a task that ends it; both take no time. A member begins when its own
work is ready, and sends to another member when both have begun. Each message is a task on its sender's stream; it loads
the sender's outgoing and the receiver's incoming links.

- Ring: in step k each member sends on the block that it received in step k - 1.
- Tree: every piece goes up from the leaves to the root and down again, hop by hop, one piece behind the other. Two
  trees take half of the pieces each (Sanders, Speck, Träff 2009; NCCL 2.4), built as NCCL builds them.
- Exchange: in round k each member sends to the k-th member after it.
- Mesh: each member sends to all others at once; an all-reduce does this twice.

All messages of a collective take the same time alone: the closed form's seconds ÷ the messages on the longest chain.
Therefore a collective alone takes its closed form's time, and a shared link or a late member delays only the messages
that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from sim.core.columns import Ints, ints
from sim.core.timeline import Detail
from sim.graph.build import ActionTasks, Built
from sim.graph.taskgraph import Collective, CollectiveStep, Launches, Waits
from sim.prices.rank_prices import Pricing
from sim.programs.compile import LocalTask
from topology.collective_kinds import KINDS

MAX_MESSAGES = 1_000_000  # half a minute of simulation
PIECES = 8  # pieces into which each of the two trees divides its half


class Hop(NamedTuple):
    """Hold a message of a collective: sender and receiver by their index in the group.

    `after`: the hops, by index, that the message waits for, besides the beginning of both members.
    """

    sender: int
    receiver: int
    after: tuple[int, ...]


class Pattern(Struct, frozen=True):
    """Hold all messages of a collective.

    `chain`: number of messages in the longest chain of waits. `piece`: part of the collective's bytes in one message.
    `at_once`: whether a member sends to several others at a time.
    """

    hops: tuple[Hop, ...]
    chain: int
    piece: float
    at_once: bool = False


def ring(members: int, passes: int) -> Pattern:
    """`passes` times round, but for the last step each: 1 for a gather or scatter, 2 for an all-reduce.

    >>> ring(3, 1).hops[3]
    Hop(sender=0, receiver=1, after=(2, 0))
    """
    steps = passes * (members - 1)
    hops = []
    for step in range(steps):
        before = (step - 1) * members
        for i in range(members):
            # The left neighbour's message of the step before brought the block that goes out now. One's own message
            # before went over the same channel, and NCCL sends a channel's chunks in order.
            after = (before + (i - 1) % members, before + i) if step else ()
            hops.append(Hop(i, (i + 1) % members, after))
    return Pattern(tuple(hops), steps, 1 / members)


def exchange(members: int) -> Pattern:
    """Return an exchange: in each round every member sends to one other."""
    # Round k begins at hop (k - 1) * members, so (k - 2) * members + i is one's own message of the round before. A
    # member sends to one other at a time, as NCCL's all-to-all of sends and receives goes through its peers by
    # distance.
    hops = [
        Hop(i, (i + k) % members, ((k - 2) * members + i,) if k > 1 else ())
        for k in range(1, members)
        for i in range(members)
    ]
    return Pattern(tuple(hops), members - 1, 1 / members)


def mesh(members: int, passes: int) -> Pattern:
    """Return a mesh: every member sends to all others at once; in a second pass it sends what it received.

    >>> mesh(3, 2).hops[6]
    Hop(sender=0, receiver=1, after=(2, 4))
    """
    edges = [(i, (i + k) % members) for k in range(1, members) for i in range(members)]
    hops = [Hop(i, j, ()) for i, j in edges]
    if passes == 2:
        into = [tuple(sorted(e for e, (_, to) in enumerate(edges) if to == i)) for i in range(members)]
        hops += [Hop(i, j, into[i]) for i, j in edges]
    return Pattern(tuple(hops), passes, 1 / members, at_once=True)


def tree(members: int, pieces: int = PIECES) -> Pattern:
    """Return an all-reduce up and down two trees."""
    hops, chain = list[Hop](), 0
    for parent in parents(members):
        depth = [_depth(parent, i) for i in range(members)]
        # The first piece passes every level up and down. Each further piece is one hop behind the one before.
        chain = max(chain, 2 * max(depth) + pieces - 1)
        edges = [(i, above) for i, above in enumerate(parent) if above is not None]
        # Edges are sorted from the root to the leaves: pieces go down in this order, up in the reverse order. The hops
        # that a hop waits for then have lower numbers.
        edges.sort(key=lambda edge: depth[edge[0]])
        children = [[i for i, above in edges if above == v] for v in range(members)]
        # By member: its last hop to its parent, and its parent's last hop to it. An edge carries one piece at a time.
        up, down = dict[int, int](), dict[int, int]()
        for _ in range(pieces):
            for i, above in reversed(edges):
                # `up[c]` is of this piece already, because children are deeper. `up[i]` is still of the piece before.
                after = (*[up[c] for c in children[i]], *([up[i]] if i in up else []))
                up[i] = len(hops)
                hops.append(Hop(i, above, after))
            for i, above in edges:
                # The root sends a piece down when every child's part of the sum has arrived. Other members pass on the
                # piece that came down.
                came = [up[c] for c in children[above]] if parent[above] is None else [down[above]]
                after = (*came, *([down[i]] if i in down else []))
                down[i] = len(hops)
                hops.append(Hop(above, i, after))
    return Pattern(tuple(hops), chain, 1 / (2 * pieces), at_once=True)


def parents(members: int) -> tuple[list[int | None], list[int | None]]:
    """Return each member's parent in NCCL's two trees (src/graph/trees.cc, `ncclGetDtree`); none is a leaf in both.

    The second tree is the first one mirrored for an even number of members, and shifted by one for an odd number.
    """
    first = [_parent(members, i) for i in range(members)]
    if members % 2:
        second = [None if up is None else (up + 1) % members for up in (first[-1], *first[:-1])]
    else:
        second = [None if up is None else members - 1 - up for up in reversed(first)]
    return first, second


def _parent(members: int, i: int) -> int | None:
    """Return a member's parent in NCCL's binary tree with root 0 (src/graph/trees.cc, `ncclGetBtree`).

    Odd members are leaves, members that are 2 times an odd number are above them, and so on.

    >>> [_parent(8, i) for i in range(8)]
    [None, 2, 4, 2, 0, 6, 4, 6]
    """
    if i == 0:
        return None
    bit = i & -i  # the lowest set bit
    up = (i ^ bit) | (bit << 1)
    return up if up < members else i ^ bit


def _depth(parent: list[int | None], i: int) -> int:
    above = parent[i]
    return 0 if above is None else 1 + _depth(parent, above)


def pattern_of(kind: str, algorithm: str, members: int) -> Pattern | None:
    """Return the messages of a collective; None if it stays one task (reduction in the switch, broadcasts)."""
    facts = KINDS[kind]
    if algorithm == "ring" and not facts.whole:
        return ring(members, facts.passes)
    # Ring attention sends keys and values to the next member, all members at once.
    if facts.messages and not facts.exchanges:
        return Pattern(tuple(Hop(i, (i + 1) % members, ()) for i in range(members)), 1, 1.0)
    if algorithm == "tree":
        return tree(members)
    if algorithm == "mesh":
        return mesh(members, facts.passes)
    if algorithm == "pairwise":
        return exchange(members)
    return None


def as_messages(built: Built, pricing: Pricing) -> Built:
    """Return the graph with messages in place of collectives of several simulated ranks.

    Raises:
        InputError: if there are more than MAX_MESSAGES.
    """

    def algorithm_of(c: int, local: LocalTask) -> str:
        """Return the algorithm that NCCL chooses for a class's part of a collective."""
        ranks = pricing.group(local.group, pricing.plan.classes[c].rank)
        return (local.choice or pricing.network.chosen(local.kind, ranks, local.detail.bytes)).algorithm

    rewriting = _Rewriting(built, algorithm_of)
    counts = np.bincount(built.graph.task_kind, minlength=len(built.graph.task_kinds)).tolist()
    messages = sum(counts[kind] * len(pattern.hops) for kind, pattern in rewriting.patterns.items())
    if messages > MAX_MESSAGES:
        raise pricing.plan.scenario.error(
            ("engine", "collectives"),
            f"{messages:,} messages in a step are too many, {MAX_MESSAGES:,} at most; take fewer micro-batches, layers "
            "or ranks, or closed_form",
        )
    return rewriting.run() if rewriting.members else built


class _Rewriting:
    """Rewrite a graph: new tasks follow the old ones; a collective's old task begins its first member's part."""

    def __init__(self, built: Built, algorithm_of: Callable[[int, LocalTask], str]) -> None:
        self.built, self.graph = built, built.graph
        self.kinds = self.graph.table
        self.members: dict[int, tuple[int, ...]] = {}  # classes of each kind of collectives that become messages
        self.patterns: dict[int, Pattern] = {}
        for number, kind in enumerate(self.graph.task_kinds):
            # With one simulated class the other members are folded into it and have no tasks to send messages to.
            if isinstance(kind.work, Collective) and len(kind.work.parts) > 1:
                c, local = kind.work.parts[0]
                pattern = pattern_of(local.kind, algorithm_of(c, local), len(kind.work.parts))
                if pattern is not None:
                    self.members[number], self.patterns[number] = tuple(c for c, _ in kind.work.parts), pattern
        self.seconds = [self.graph.seconds.copy()]
        self.task_kind = [self.graph.task_kind.copy()]
        self.step = [self.graph.columns.step]
        self.first: list[Ints] = []
        self.second: list[Ints] = []
        self.count = len(self.graph)
        self.begins: dict[tuple[int, int], int] = {}  # by collective and class
        self.ends: dict[tuple[int, int], int] = {}
        # Begins and ends take no time and have no row in the timeline.
        self.silent = -1 if not self.members else self.kinds.new_kind(Detail(""))

    def run(self) -> Built:
        """Replace all collectives that become messages."""
        for kind in self.members:
            tasks = np.flatnonzero(self.graph.task_kind == kind)
            if len(tasks):
                self._replace(kind, tasks)
        waits, launches = self._waits(), self._launches()
        columns = self.graph.columns._replace(
            seconds=np.concatenate(self.seconds),
            task_kind=np.concatenate(self.task_kind),
            step=np.concatenate(self.step),
            waits=waits,
            launches=launches,
        )
        # An action that begins or ends with a collective begins or ends with its own class's part.
        actions = [
            ActionTasks(acted.listed, self._moved(acted.first, c, self.begins), self._moved(acted.last, c, self.ends))
            for c, acted in enumerate(self.built.actions)
        ]
        return replace(self.built, graph=replace(self.graph, columns=columns), actions=actions)

    def _replace(self, kind: int, tasks: Ints) -> None:
        """Replace all collectives of a kind by messages."""
        members, pattern, many = self.members[kind], self.patterns[kind], len(tasks)
        seconds = float(self.graph.seconds[tasks[0]])
        hop_kinds = self._hop_kinds(kind, seconds)
        hops, n = len(pattern.hops), len(members)
        own = 2 * n - 1 + hops  # new tasks of each: begins but for the first, ends, hops
        base = self.count + own * np.arange(many)
        # The old task becomes the first member's begin, so no other task gets a new number.
        begin = np.column_stack([tasks, base[:, None] + np.arange(n - 1)])
        end = base[:, None] + n - 1 + np.arange(n)
        hop = base[:, None] + 2 * n - 1 + np.arange(hops)
        self.seconds[0][tasks], self.task_kind[0][tasks] = 0.0, self.silent
        self.seconds.append(np.tile([0.0] * (2 * n - 1) + [seconds / pattern.chain] * hops, many))
        self.task_kind.append(np.tile([self.silent] * (2 * n - 1) + hop_kinds, many))
        self.step.append(np.repeat(self.graph.columns.step[tasks], own))
        self.count += own * many
        pairs = [(hop[:, a], hop[:, i]) for i, x in enumerate(pattern.hops) for a in x.after]
        pairs += [(begin[:, m], hop[:, i]) for i, x in enumerate(pattern.hops) for m in (x.sender, x.receiver)]
        # Messages between two members follow each other, so the end of a part waits only for the last of each edge.
        last = {(x.sender, x.receiver): i for i, x in enumerate(pattern.hops)}
        pairs += [(hop[:, i], end[:, m]) for edge, i in last.items() for m in edge]
        for first, second in pairs:
            self.first.append(first)
            self.second.append(second)
        for row, task in enumerate(tasks.tolist()):
            for place, c in enumerate(members):
                self.begins[task, c] = int(begin[row, place])
                self.ends[task, c] = int(end[row, place])

    def _hop_kinds(self, kind: int, seconds: float) -> list[int]:
        """Return a new kind of task for each message of a kind of collectives."""
        whole, pattern = self.graph.task_kinds[kind], self.patterns[kind]
        assert isinstance(whole.work, Collective)
        parts, edges = whole.work.parts, {(x.sender, x.receiver) for x in pattern.hops}
        # In a tree a member may send to its parent and to both children at a time. Each message then has a share of the
        # closed form's load on the member's links.
        out = [sum(a == i for a, _ in edges) if pattern.at_once else 1 for i in range(len(parts))]
        into = [sum(b == i for _, b in edges) if pattern.at_once else 1 for i in range(len(parts))]
        rank = [self.graph.classes[c].rank for c, _ in parts]
        rows = {row[0]: row for row in whole.rows}
        works = {  # one record for all messages between two members
            (i, j): CollectiveStep(parts[i], parts[j], seconds, pattern.chain, 1 / out[i], 1 / into[j])
            for i, j in edges
        }
        made, count = list[int](), len(pattern.hops)
        for number, (i, j, _) in enumerate(pattern.hops, start=1):
            detail = whole.detail._replace(
                name=f"{whole.detail.name}: message {number} of {count}, rank {rank[i]} to {rank[j]}",
                bytes=whole.detail.bytes * pattern.piece,
            )
            made.append(self.kinds.new_kind(detail, (rows[parts[i][0]],), work=works[i, j]))
        return made

    def _waits(self) -> Waits:
        """Return the graph's waits, with those of collectives replaced by waits of each member."""
        waits = self.graph.columns.waits
        replaced = np.isin(self.graph.task_kind, list(self.members))
        # Waits that concern no replaced collective stay as columns.
        touched = replaced[waits.first] | replaced[waits.second]
        first, second = list[int](), list[int]()
        for a, b in zip(waits.first[touched].tolist(), waits.second[touched].tolist(), strict=True):
            for c, d in self._common(a, b):
                first.append(self.ends.get((a, c), a))
                second.append(self.begins.get((b, d), b))
        firsts = [waits.first[~touched], *self.first, ints(first)]
        seconds = [waits.second[~touched], *self.second, ints(second)]
        return Waits(np.concatenate(firsts), np.concatenate(seconds))

    def _launches(self) -> Launches:
        """Return the graph's launches; a launch of a collective becomes one for each of the launcher's ranks."""
        rows = [
            # A launch counts from a start, so both sides are begins.
            (self.begins.get((a, c), a), self.begins.get((b, d), b), lag_s)
            for a, b, lag_s in zip(*(column.tolist() for column in self.graph.columns.launches), strict=True)
            for c, d in self._common(a, b)
        ]
        first, second, lag_s = ([row[i] for row in rows] for i in range(3))
        return Launches(ints(first), ints(second), np.array(lag_s, dtype=np.float64))

    def _common(self, a: int, b: int) -> list[tuple[int, int]]:
        """Return pairs of classes by which task b waits for task a: the common classes, or else each with each."""
        of_a, of_b = (
            dict.fromkeys(row[0] for row in self.graph.task_kinds[self.graph.task_kind[task]].rows) for task in (a, b)
        )
        # A member's part waits for its own rank's tasks, not for those of other members.
        both = [(c, c) for c in of_a if c in of_b]
        return both or [(c, d) for c in of_a for d in of_b]

    def _moved(self, tasks: Ints, c: int, to: dict[tuple[int, int], int]) -> Ints:
        return ints([to.get((task, c), task) for task in tasks.tolist()])
