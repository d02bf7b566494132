"""What the communications of a step put on links that they share.

Links are numbered class of ranks by class, so folded ranks count once, as their times do. The closed forms already
share what lies above between GPUs; here what a GPU sends is compared with what its own links carry
(`topology.shares`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sim.actions import Action
from sim.graph.sharing import Flow, Flows
from sim.graph.template import Launch, LocalTask, Template
from sim.prices.pricing import HOST_COPIES, Pricing
from topology.shares import LINKS, Load, capacities, collective_load, copy_load, links_of, message_load, way_of

Place = tuple[int, Action]  # an action of a class of ranks
OUT, IN = 0, 1
OF_CLASS = 2 * len(LINKS)  # links of a class of ranks: each of `LINKS`, out and in


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """What a communication does to the links of each class of ranks that it is of: `quiet_s` as in `Flow`, bytes/s by
    the link's number among those of the class."""

    quiet_s: float
    rates: list[tuple[int, float]]


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
        alike: dict[tuple[object, ...], int] = {}  # those of equal context have equal loads
        self._alike = [alike.setdefault(pricing.context(c.rank), len(alike)) for c in pricing.plan.classes]
        self._known: dict[tuple[object, ...], Flow] = {}
        self._sent: dict[tuple[object, ...], _Sent] = {}  # equal for classes that are alike
        self._launched: dict[tuple[int, Template], list[tuple[Launch, _Sent | None]]] = {}
        self._waits: dict[tuple[int, Template], frozenset[str]] = {}
        self._sharing: dict[tuple[int, str], frozenset[str]] = {}

    def placing_apart(self, more: set[Place] | None) -> LinkBook:
        """An empty book for the same step, with more actions to place task by task, or all."""
        book = LinkBook(self.pricing, self.shared, None if more is None or self.apart is None else self.apart | more)
        book._known, book._sent, book._launched = self._known, self._sent, self._launched
        book._waits, book._sharing = self._waits, self._sharing
        return book

    def places_apart(self, class_index: int, action: Action, template: Template) -> bool:
        """Whether an action must be placed task by task."""
        if self.apart is not None:
            return (class_index, action) in self.apart
        return bool(self.most(class_index, template).path)

    def launched(self, class_index: int, template: Template) -> list[tuple[Launch, Flow | None]]:
        """What a template leaves running, stream by stream: one for each communication where these use shared links."""
        key = (self._alike[class_index], template)
        known = self._launched.get(key)
        if known is None:
            known = self._launched[key] = self._new_launched(class_index, template)
        return [(x, None if sent is None else self._flow((class_index, sent))) for x, sent in known]

    def _new_launched(self, class_index: int, template: Template) -> list[tuple[Launch, _Sent | None]]:
        if not any(self._shares(class_index, local.group) for _, local in template.launches_apart):
            return [(launch, None) for launch in template.launches]
        apart = sorted(template.launches_apart, key=lambda x: x[0].stream)
        shares = [self._shares(class_index, local.group) for _, local in apart]
        return [(x, self._sent_by(class_index, t) if s else None) for (x, t), s in zip(apart, shares, strict=True)]

    def message(self, sender: int, receiver: int, size_bytes: float, seconds: float) -> Flow:
        """What a message from one class of ranks to another does to links."""
        network, classes = self.pricing.network, self.pricing.plan.classes
        source, target = classes[sender].rank, classes[receiver].rank
        key = ("message", *way_of(network, source, target), size_bytes, seconds)
        sent = self._sent.get(key)
        if sent is None:
            load = message_load(network, source, target, size_bytes)
            sent = self._sent[key] = self._at_once(load, seconds, (OUT, IN))
        of_class = (OF_CLASS * sender, OF_CLASS * receiver)  # whose links lead out, and in: even numbers, and odd
        return Flow(sent.quiet_s, {of_class[link % 2] + link: rate for link, rate in sent.rates})

    def collective(self, sort: int, parts: Mapping[int, LocalTask]) -> None:
        """Collectives of this sort are those of these classes of ranks, each with its part in them: all take as long as
        the slowest, and each has its own bytes on its own links."""
        members = sorted(parts, key=lambda c: -parts[c].seconds)
        seconds = parts[members[0]].seconds
        members = [c for c in members if self._shares(c, parts[c].group)]
        if members:
            self.add(sort, self._flow(*((c, self._sent_by(c, parts[c]._replace(seconds=seconds))) for c in members)))

    def hides(self, class_index: int, template: Template) -> bool:
        """Whether what a template waits for uses shared links, so that a task for all of it hides that."""
        return bool(self._inside(class_index, template))

    def add(self, sort: int, flow: Flow) -> None:
        """What tasks of this sort do to links."""
        if flow.path:
            self.flows.by_sort[sort] = flow

    def _shares(self, class_index: int, group: str) -> frozenset[str]:
        """The shared links that a class's group uses."""
        key = (self._alike[class_index], group)
        if key not in self._sharing:
            rank = self.pricing.plan.classes[class_index].rank
            links = ("host",) if group == "host" else links_of(self.pricing.network, self.pricing.group(group, rank))
            self._sharing[key] = self.shared.intersection(links)
        return self._sharing[key]

    def _inside(self, class_index: int, template: Template) -> frozenset[str]:
        """The shared links that a template uses for what it waits for."""
        key = (self._alike[class_index], template)
        if key not in self._waits:
            groups = {t.group for t in template.tasks if t.group and t.stream in template.joined}
            self._waits[key] = frozenset().union(*(self._shares(class_index, group) for group in groups))
        return self._waits[key]

    def _sent_by(self, class_index: int, local: LocalTask) -> _Sent:
        """What a collective does to the links of a class that takes part."""
        key = (self._alike[class_index], local.group, local.kind, local.detail.bytes, local.detail.note, local.seconds)
        sent = self._sent.get(key)
        if sent is None:
            ways = {"OFFLOAD": (OUT,), "RELOAD": (IN,)}.get(local.kind, (OUT, IN))
            sent = self._sent[key] = self._at_once(self._load(class_index, local), local.seconds, ways)
        return sent

    def _load(self, class_index: int, local: LocalTask) -> Load:
        network, rank, kind = self.pricing.network, self.pricing.plan.classes[class_index].rank, local.kind.lower()
        if kind in HOST_COPIES:
            return copy_load(network, local.detail.bytes)
        ranks = self.pricing.group(local.group, rank)
        return collective_load(network, kind, ranks, local.detail.bytes, local.detail.note)

    def _at_once(self, load: Load, seconds: float, ways: Iterable[int]) -> _Sent:
        """The load on shared links, at most what these carry."""
        flowing_s = load.flowing * seconds
        if flowing_s <= 0:
            return _Sent(seconds, [])
        sent = [(i, min(load.bytes[n] / flowing_s, self.capacity[n])) for i, n in enumerate(LINKS) if n in load.bytes]
        rates = [(i, rate) for i, rate in sent if LINKS[i] in self.shared]
        return _Sent(seconds - flowing_s, [(2 * i + way, rate) for way in ways for i, rate in rates])

    def _flow(self, *sent: tuple[int, _Sent]) -> Flow:
        """The same, of these classes; bytes flow when those of the first do."""
        flow = self._known.get(sent)
        if flow is None:
            path = {OF_CLASS * c + link: rate for c, each in sent for link, rate in each.rates}
            flow = self._known[sent] = Flow(sent[0][1].quiet_s, path)
        return flow

    def most(self, class_index: int, template: Template) -> Flow:
        """The most that what a template waits for puts on each link at once, all streams free at its start."""
        key = (class_index, template)
        if key not in self._known:
            left = {x.stream for x in template.launches}
            changes: dict[int, list[tuple[float, float]]] = {}
            for task, end_s in zip(template.tasks, template.ends_s, strict=True):
                if task.group and task.stream not in left and self._shares(class_index, task.group):
                    flow = self._flow((class_index, self._sent_by(class_index, task)))
                    for link, load in flow.path.items():
                        changes.setdefault(link, []).append((end_s - task.seconds + flow.quiet_s, load))
                        changes[link].append((end_s, -load))
            self._known[key] = Flow(0.0, {link: _highest(each) for link, each in changes.items()})
        return self._known[key]


def _highest(changes: list[tuple[float, float]]) -> float:
    """The highest sum of loads; at one instant what ends comes first."""
    level = most = 0.0
    for _, change in sorted(changes):
        level += change
        most = max(most, level)
    return most
