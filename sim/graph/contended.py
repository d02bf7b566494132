"""Which communications of a step share links, and the step run so that these slow each other.

What every GPU sends is compared with what its own links carry (`topology.shares`): the closed forms already share what
lies above between GPUs. Links are numbered class of ranks by class, so folded ranks count once, as their times do.

A link that only one stream of a rank uses is never shared. Of the others, the static pass tells whether they are ever
asked for more than they carry; if not, its times stand, to the last bit. If so, the graph runs again with rates that
change on every arrival and departure. Actions that stand as one task hide their communications: those that overlap
with others on a full link are placed task by task first, and no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.actions import Action, Schedule
from sim.graph.data_parallel import DP
from sim.graph.engine import Times, run_contended, run_simpy, run_static
from sim.graph.sharing import FULL, Flow, Flows
from sim.graph.template import COMPUTE, LocalTask, Template
from sim.prices.pricing import HOST_COPIES, Pricing
from topology.shares import (
    LINKS,
    Load,
    capacities,
    collective_load,
    copy_load,
    links_between,
    links_of,
    message_load,
)

if TYPE_CHECKING:
    from sim.graph.build import Built

Place = tuple[int, Action]  # an action of a class of ranks
Path = dict[int, float]
Use = tuple[str, int, str]  # of a link: its name, direction, and the stream that uses it
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
OUT, IN = 0, 1
BLIP = 1e-12  # of a step: overlaps as short are the rounding of sums
ROUNDS = 6  # of placing more actions task by task; then all that use shared links


class Crowd(NamedTuple):
    """The sorts of links that are somewhere asked for more than they carry, and the actions that hide part of it."""

    links: frozenset[str]
    hiding: set[Place]


class LinkBook:
    """What the sorts of tasks of one graph put on shared links; `whole_actions`: sorts that stand for a template of a
    class of ranks. `apart`: actions to place task by task; None: all that use shared links."""

    def __init__(self, pricing: Pricing, shared: frozenset[str], apart: set[Place] | None) -> None:
        self.pricing, self.shared, self.apart = pricing, shared, apart
        self.capacity = capacities(pricing.plan.scenario.cluster)
        each = [
            self.capacity[name] * (pricing.network.left_inside(c.rank) if name == "domain" else 1.0)
            for c in pricing.plan.classes
            for name in LINKS
            for _ in (OUT, IN)
        ]
        self.flows = Flows(dict(enumerate(each)))
        self.whole_actions: dict[int, tuple[int, Template]] = {}
        self.templates: dict[tuple[object, ...], Template] = {}  # compiled, for the next graph of the same step
        self._contexts = [pricing.context(c.rank) for c in pricing.plan.classes]  # equal ones have equal loads
        self._known: dict[tuple[object, ...], Flow] = {}
        self._loads: dict[tuple[object, ...], Load] = {}
        self._sharing: dict[tuple[object, str], frozenset[str]] = {}

    def placing_apart(self, more: set[Place] | None) -> LinkBook:
        """An empty book for the same step, with more actions to place task by task, or all."""
        book = LinkBook(self.pricing, self.shared, None if more is None or self.apart is None else self.apart | more)
        book.templates, book._known = self.templates, self._known
        book._loads, book._sharing = self._loads, self._sharing
        return book

    def places_apart(self, class_index: int, action: Action, template: Template) -> bool:
        """Whether an action must be placed task by task."""
        if self.apart is not None:
            return (class_index, action) in self.apart
        return bool(self._most(class_index, template).path)

    def launches_apart(self, class_index: int, template: Template) -> bool:
        """Whether what a template leaves running has a task for each communication: where these use shared links."""
        return any(self._shares(class_index, local.group) for _, local in template.launches_apart)

    def message(self, sort: int, sender: int, receiver: int, size_bytes: float, seconds: float) -> None:
        """Messages of this sort go from one class of ranks to another."""
        classes = self.pricing.plan.classes
        load = message_load(self.pricing.network, classes[sender].rank, classes[receiver].rank, size_bytes)
        self._add(sort, self._flow(load, seconds, ((sender, OUT), (receiver, IN))))

    def collective(self, sort: int, members: Sequence[int], local: LocalTask) -> None:
        """Collectives of this sort are those of these classes of ranks."""
        if self._shares(members[0], local.group):
            self._add(sort, self._of(members, local))

    def whole(self, class_index: int, template: Template, sort: int, launches: Sequence[int]) -> None:
        """Tasks of this sort stand for what a template waits for, those of `launches` for what it leaves running."""
        if self._inside(class_index, template):
            self.whole_actions[sort] = (class_index, template)
        if self.launches_apart(class_index, template):
            for its, (_, local) in zip(launches, template.launches_apart, strict=True):
                self.collective(its, (class_index,), local)

    def _add(self, sort: int, flow: Flow) -> None:
        if flow.path:
            self.flows.by_sort[sort] = flow

    def _shares(self, class_index: int, group: str) -> frozenset[str]:
        """The shared links that a class's group uses."""
        key = (self._contexts[class_index], group)
        if key not in self._sharing:
            rank = self.pricing.plan.classes[class_index].rank
            links = ("host",) if group == "host" else links_of(self.pricing.network, self.pricing.group(group, rank))
            self._sharing[key] = self.shared.intersection(links)
        return self._sharing[key]

    def _inside(self, class_index: int, template: Template) -> frozenset[str]:
        """The shared links that a template uses for what it waits for."""
        groups = {t.group for t in template.tasks if t.group and t.stream in template.joined}
        return frozenset().union(*(self._shares(class_index, group) for group in groups))

    def _of(self, members: Sequence[int], local: LocalTask) -> Flow:
        """A collective of these classes."""
        key = (members, local.group, local.kind, local.detail.bytes, local.seconds)
        if key not in self._known:
            ways = {"OFFLOAD": (OUT,), "RELOAD": (IN,)}.get(local.kind, (OUT, IN))
            load = self._load(members[0], local.kind.lower(), local.group, local.detail.bytes, local.detail.note)
            self._known[key] = self._flow(load, local.seconds, [(c, way) for c in members for way in ways])
        return self._known[key]

    def _load(self, class_index: int, kind: str, group: str, size_bytes: float, chosen: str) -> Load:
        key = (self._contexts[class_index], kind, group, size_bytes, chosen)
        if key not in self._loads:
            network, rank = self.pricing.network, self.pricing.plan.classes[class_index].rank
            if kind in HOST_COPIES:
                self._loads[key] = copy_load(network, size_bytes)
            else:
                ranks = self.pricing.group(group, rank)
                self._loads[key] = collective_load(network, kind, ranks, size_bytes, chosen)
        return self._loads[key]

    def _flow(self, load: Load, seconds: float, ends: Iterable[tuple[int, int]]) -> Flow:
        """The load on the shared links of classes of ranks, at most what these carry."""
        flowing_s = load.flowing * seconds
        if flowing_s <= 0:
            return Flow(seconds, {})
        sent = [(i, min(load.bytes[n] / flowing_s, self.capacity[n])) for i, n in enumerate(LINKS) if n in load.bytes]
        rates = [(i, rate) for i, rate in sent if LINKS[i] in self.shared]
        return Flow(seconds - flowing_s, {2 * (len(LINKS) * c + i) + way: rate for c, way in ends for i, rate in rates})

    def _most(self, class_index: int, template: Template) -> Flow:
        """The most that what a template waits for puts on each link at once, all streams free at its start."""
        key = (class_index, template)
        if key not in self._known:
            left = {x.stream for x in template.launches}
            changes: dict[int, list[tuple[float, float]]] = {}
            for task, end_s in zip(template.tasks, template.ends_s, strict=True):
                if task.group and task.stream not in left and self._shares(class_index, task.group):
                    flow = self._of((class_index,), task)
                    for link, load in flow.path.items():
                        changes.setdefault(link, []).append((end_s - task.seconds + flow.quiet_s, load))
                        changes[link].append((end_s, -load))
            self._known[key] = Flow(0.0, {link: _highest(each) for link, each in changes.items()})
        return self._known[key]

    def _full(self, class_index: int, template: Template) -> Flow:
        """More than what a template waits for can put on links: all that they carry, where it uses one stream."""
        if len(template.joined - {COMPUTE}) > 1:
            return self._most(class_index, template)
        load = Load(1.0, {name: self.capacity[name] for name in self._inside(class_index, template)})
        return self._flow(load, 1.0, ((class_index, OUT), (class_index, IN)))

    def crowd(self, built: Built, times: Times) -> Crowd:
        """Where links are asked for more than they carry, were all flows as fast as alone."""
        found = self._crowd(built, times, {s: self._full(*what) for s, what in self.whole_actions.items()})
        if not found.hiding:
            return found
        return self._crowd(built, times, {s: self._most(*what) for s, what in self.whole_actions.items()})

    def _crowd(self, built: Built, times: Times, hidden: dict[int, Flow]) -> Crowd:
        """The same, given what actions that stand as one task put on links at most."""
        of_sort = {**self.flows.by_sort, **hidden}
        kinds = {id(flow): flow for flow in of_sort.values()}
        numbers = {key: i for i, key in enumerate(kinds)}
        entries = [
            (number, kinds[key].quiet_s, link, load / self.flows.capacity_bytes_per_s[link])
            for key, number in numbers.items()
            for link, load in kinds[key].path.items()
        ]
        if not entries:
            return Crowd(frozenset(), set())
        number_of = np.full(len(built.graph.sorts), -1)
        number_of[list(of_sort)] = [numbers[id(flow)] for flow in of_sort.values()]
        number, quiet_s, link, load = (np.array(column) for column in zip(*entries, strict=True))
        start, end, sort = (np.array(x) for x in (times.start_s, times.end_s, built.graph.sort))
        entry, task = _join(number, number_of[sort])
        begin_s, blip_s = start[task] + quiet_s[entry], BLIP * end.max()
        over_s = _over_seconds(link[entry], begin_s, end[task], load[entry], blip_s)
        hiding = set(task[np.isin(sort[task], list(hidden)) & (over_s > 0)].tolist())
        links = np.unique(link[entry[over_s > 0]] // 2 % len(LINKS))
        return Crowd(frozenset(LINKS[i] for i in links), _places(built, hiding))


def _places(built: Built, tasks: set[int]) -> set[Place]:
    """The actions that these tasks stand for."""
    return {
        (i, action)
        for i, acted in enumerate(built.actions if tasks else ())
        for action, first in zip(acted.actions, acted.first, strict=True)
        if first in tasks
    }


def _join(wanted: Ints, of_task: Ints) -> tuple[Ints, Ints]:
    """Pairs of a row of `wanted` and a task of the same number, as two columns of indices."""
    order = np.argsort(of_task, kind="stable")
    first, last = (np.searchsorted(of_task[order], wanted, side) for side in ("left", "right"))
    row = np.repeat(np.arange(len(wanted)), last - first)
    within = np.arange(len(row)) - np.repeat(np.cumsum(last - first) - (last - first), last - first)
    return row, order[first[row] + within]


def _over_seconds(link: Ints, begin_s: Floats, until_s: Floats, load: Floats, blip_s: float) -> Floats:
    """For how much of each interval its link is asked for more than it carries (a load of 1)."""
    n = len(link)
    load = np.where(until_s > begin_s, load, 0.0)
    links, times = np.concatenate([link, link]), np.concatenate([begin_s, until_s])
    order = np.lexsort((np.arange(2 * n) < n, times, links))  # at one instant ends come first
    level = np.cumsum(np.concatenate([load, -load])[order])
    lasts = np.diff(times[order], append=0.0) * (np.diff(links[order], append=-1) == 0)
    reached = np.cumsum(np.where((level > FULL) & (lasts > blip_s), lasts, 0.0))
    before = np.empty(2 * n)
    before[order] = np.concatenate([[0.0], reached[:-1]])
    return np.where(load > 0, before[n:] - before[:n], 0.0)


def _highest(changes: list[tuple[float, float]]) -> float:
    """The highest sum of loads; at one instant what ends comes first."""
    level = most = 0.0
    for _, change in sorted(changes):
        level += change
        most = max(most, level)
    return most


def shared_links(pricing: Pricing, schedule: Schedule) -> frozenset[str]:
    """The links of `topology.shares.LINKS` that more than one stream of some rank uses in one direction."""
    plan, network = pricing.plan, pricing.network
    training, lanes = plan.scenario.training, plan.lanes
    offload = training is not None and training.activation_offload
    alike: dict[tuple[object, ...], set[Use]] = {}
    for c in plan.classes:
        context = pricing.context(c.rank)
        if context not in alike:
            alike[context] = _group_uses(pricing, c.rank)
    uses = [set(alike[pricing.context(c.rank)]) for c in plan.classes]
    for chain in schedule.chains:
        for before, after in pairwise(schedule.rank_of_stage[s] for s in chain):
            for lane in range(lanes if before != after else 0):
                a, b = before * lanes + lane, after * lanes + lane
                links = links_between(network, plan.classes[a].rank, plan.classes[b].rank)
                uses[a] |= {u for n in links for u in ((n, OUT, f"to {b}"), (n, IN, f"from {b}"))}
                uses[b] |= {u for n in links for u in ((n, IN, f"from {a}"), (n, OUT, f"to {a}"))}
    for each in uses if offload else ():
        each |= {("host", OUT, "host"), ("host", IN, "host")}
    users = [Counter((link, way) for link, way, _ in each) for each in uses]
    shared = {link for each in users for (link, _), n in each.items() if n > 1}
    return frozenset(shared if offload else shared - {"host"})


def _group_uses(pricing: Pricing, rank: int) -> set[Use]:
    """Those of a rank's collectives; after the last backward each has the links to itself."""
    plan = pricing.plan
    data = ("dp_cp",) if plan.scenario.parallelism.zero == 0 else ("shard", "replica")
    streams = {"tp": "tp", "cp": "cp", **dict.fromkeys(data, DP)}
    if plan.scenario.model.moe is not None:
        experts = ("dp",) if plan.scenario.parallelism.zero == 0 else data
        streams |= {"ep": "ep", "expert_tp": "expert_tp", **{f"expert_{name}": DP for name in experts}}
    return {
        (link, way, stream)
        for name, stream in streams.items()
        if plan.group_size(name) > 1
        for link in links_of(pricing.network, pricing.group(name, rank))
        for way in (OUT, IN)
    }


class Ran(NamedTuple):
    """A step that was built and run. `alone_s`: how long it takes if links carry everything at once; `links`: the sorts
    of links that do not, and `flows` what uses them, None where there are none."""

    built: Built
    times: Times
    alone_s: float
    links: frozenset[str]
    flows: Flows | None


def run_alone(make: Callable[[LinkBook | None], Built], simpy: bool) -> Ran:
    """Build a step and run it as if links carried everything at once: never slower than `run_step`."""
    built = make(None)
    times = run_simpy(built.graph) if simpy else run_static(built.graph)
    return Ran(built, times, max(times.end_s, default=0.0), frozenset(), None)


def run_step(make: Callable[[LinkBook | None], Built], pricing: Pricing, schedule: Schedule, simpy: bool) -> Ran:
    """Build a step and run it, with links shared where that matters."""
    shared = shared_links(pricing, schedule)
    book = LinkBook(pricing, shared, set()) if shared else None
    built = make(book)
    times = run_simpy(built.graph) if simpy else run_static(built.graph)
    alone_s = max(times.end_s, default=0.0)
    crowd = book.crowd(built, times) if book else Crowd(frozenset(), set())
    if book is None or not crowd.links:
        return Ran(built, times, alone_s, frozenset(), None)
    for left in reversed(range(ROUNDS)):
        if crowd.hiding:
            book = book.placing_apart(crowd.hiding if left else None)
            built = make(book)
        times = run_simpy(built.graph, book.flows) if simpy else run_contended(built.graph, book.flows)
        crowd = book.crowd(built, times) if book.whole_actions else Crowd(crowd.links, set())
        if not crowd.hiding:
            break
    return Ran(built, times, alone_s, crowd.links, book.flows)
