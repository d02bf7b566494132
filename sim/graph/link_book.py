"""What the communications of a step put on links that they share.

Links are numbered class of ranks by class, so folded ranks count once, as their times do. The closed forms already
share what lies above between GPUs; here what a GPU sends is compared with what its own links carry
(`topology.shares`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sim.actions import Action
from sim.graph.sharing import Flow, Flows
from sim.graph.template import COMPUTE, Launch, LocalTask, Template
from sim.prices.pricing import HOST_COPIES, Pricing
from topology.shares import LINKS, Load, capacities, collective_load, copy_load, links_of, message_load

Place = tuple[int, Action]  # an action of a class of ranks
OUT, IN = 0, 1


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
        self._contexts = [pricing.context(c.rank) for c in pricing.plan.classes]  # equal ones have equal loads
        self._known: dict[tuple[object, ...], Flow] = {}
        self._loads: dict[tuple[object, ...], Load] = {}
        self._sharing: dict[tuple[object, str], frozenset[str]] = {}

    def placing_apart(self, more: set[Place] | None) -> LinkBook:
        """An empty book for the same step, with more actions to place task by task, or all."""
        book = LinkBook(self.pricing, self.shared, None if more is None or self.apart is None else self.apart | more)
        book._known = self._known
        book._loads, book._sharing = self._loads, self._sharing
        return book

    def places_apart(self, class_index: int, action: Action, template: Template) -> bool:
        """Whether an action must be placed task by task."""
        if self.apart is not None:
            return (class_index, action) in self.apart
        return bool(self.most(class_index, template).path)

    def launched(self, class_index: int, template: Template) -> list[tuple[Launch, Flow | None]]:
        """What a template leaves running, stream by stream: one for each communication where these use shared links."""
        if not any(self._shares(class_index, local.group) for _, local in template.launches_apart):
            return [(launch, None) for launch in template.launches]
        apart = sorted(template.launches_apart, key=lambda x: x[0].stream)
        shares = [self._shares(class_index, local.group) for _, local in apart]
        return [(x, self._of((class_index,), t) if s else None) for (x, t), s in zip(apart, shares, strict=True)]

    def message(self, sort: int, sender: int, receiver: int, size_bytes: float, seconds: float) -> None:
        """Messages of this sort go from one class of ranks to another."""
        key = ("message", sender, receiver, size_bytes, seconds)
        if key not in self._known:
            source, target = (self.pricing.plan.classes[i].rank for i in (sender, receiver))
            load = message_load(self.pricing.network, source, target, size_bytes)
            self._known[key] = self._flow(load, seconds, ((sender, OUT), (receiver, IN)))
        self.add(sort, self._known[key])

    def collective(self, sort: int, members: Sequence[int], local: LocalTask) -> None:
        """Collectives of this sort are those of these classes of ranks."""
        if self._shares(members[0], local.group):
            self.add(sort, self._of(members, local))

    def hides(self, class_index: int, template: Template) -> bool:
        """Whether what a template waits for uses shared links, so that a task for all of it hides that."""
        return bool(self._inside(class_index, template))

    def add(self, sort: int, flow: Flow) -> None:
        """What tasks of this sort do to links."""
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

    def most(self, class_index: int, template: Template) -> Flow:
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

    def full(self, class_index: int, template: Template) -> Flow:
        """More than what a template waits for can put on links: all that they carry, where it uses one stream."""
        if len(template.joined - {COMPUTE}) > 1:
            return self.most(class_index, template)
        load = Load(1.0, {name: self.capacity[name] for name in self._inside(class_index, template)})
        return self._flow(load, 1.0, ((class_index, OUT), (class_index, IN)))


def _highest(changes: list[tuple[float, float]]) -> float:
    """The highest sum of loads; at one instant what ends comes first."""
    level = most = 0.0
    for _, change in sorted(changes):
        level += change
        most = max(most, level)
    return most
