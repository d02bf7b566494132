"""What the communications of a step put on links that they share, read from the kinds of a finished graph's tasks.

Links are numbered class of ranks by class, so folded ranks count once, as their times do. The closed forms already
share what lies above between GPUs; here what a GPU sends is compared with what its own links carry
(`topology.shares`).
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from sim.engine.link_rates import Flow, Flows
from sim.graph.taskgraph import Collective, CollectiveStep, Message, TaskGraph, WholeAction
from sim.prices.profile import HOST_COPIES
from sim.prices.rank_prices import Pricing
from sim.programs.compile import CompiledProgram, LocalTask
from topology.shares import LINKS, Load, capacities, collective_load, copy_load, links_of, message_load, way_of

OUT, IN = 0, 1
# A link's number is OF_CLASS * class + 2 * place in LINKS + direction. So `number % 2` is the direction, and the links
# of a class stand together.
OF_CLASS = 2 * len(LINKS)  # links of a class of ranks: each of `LINKS`, out and in


class _ClassLoad(Struct, frozen=True, eq=False):
    """What a communication puts on the links of one class of ranks: `quiet_s` as in `Flow`, and bytes/s by the link's
    number among those of the class."""

    quiet_s: float
    rates_bytes_per_s: list[tuple[int, float]]


class LinkLoads:
    """Works out what tasks put on the links `shared`; answers are kept for all graphs of one step."""

    def __init__(self, pricing: Pricing, shared: frozenset[str]) -> None:
        self.pricing, self.shared = pricing, shared
        self._carried = capacities(pricing.plan.scenario.cluster)
        by_link = [
            self._carried[name] * left.get(name, 1.0)
            # The three loops nest in the order of the link's number: class, then name, then direction.
            for left in (pricing.network.own_links_left(c.rank) for c in pricing.plan.classes)
            for name in LINKS
            # Links are full duplex, so each direction carries it all.
            for _ in (OUT, IN)
        ]
        self.capacity_bytes_per_s = dict(enumerate(by_link))
        # Classes of equal context pay equal prices and lie alike, so what one of them sends is worked out once.
        contexts: dict[tuple[object, ...], int] = {}
        self._context = [contexts.setdefault(pricing.context(c.rank), len(contexts)) for c in pricing.plan.classes]
        self._group_links: dict[tuple[int, str], frozenset[str]] = {}
        self._class_loads: dict[tuple[object, ...], _ClassLoad] = {}
        self._flows: dict[tuple[object, ...], Flow] = {}
        self._waited_links: dict[tuple[int, CompiledProgram], frozenset[str]] = {}
        self._peaks: dict[tuple[int, CompiledProgram], Flow] = {}

    def flows(self, graph: TaskGraph) -> Flows:
        """What the communications of a graph do to links, by kind of task."""
        flows, steps = Flows(self.capacity_bytes_per_s), dict[int, Flow]()
        for number, kind in enumerate(graph.task_kinds):
            if isinstance(kind.work, Message):
                flow = self.message(kind.work)
            elif isinstance(kind.work, Collective):
                flow = self._collective(kind.work)
            elif isinstance(kind.work, CollectiveStep):
                # The messages between two members share one work, so its identity spares comparing it.
                flow = steps.get(id(kind.work)) or steps.setdefault(id(kind.work), self._step(kind.work))
            else:
                continue
            # What uses no shared link is no flow: its end is known at its start, and no clock is needed for it.
            if flow.path:
                flows.by_task_kind[number] = flow
        return flows

    def hidden(self, graph: TaskGraph) -> dict[int, Flow]:
        """By kind of task, for the actions that stand as one task and hide communication on shared links: the most
        that they put on links at once."""
        return {
            number: self.peak(kind.work)
            for number, kind in enumerate(graph.task_kinds)
            if isinstance(kind.work, WholeAction) and self._waits_on_shared(kind.work)
        }

    def peak(self, action: WholeAction) -> Flow:
        """The most that what an action waits for puts on each link at once, all streams free at its start."""
        class_index, program = action
        if action not in self._peaks:
            # What is left running has tasks of its own, whose flows are counted there.
            left = program.launch_streams
            changes: dict[int, list[tuple[float, float]]] = {}
            for task, end_s in zip(program.tasks, program.ends_s, strict=True):
                if task.group and task.stream not in left and self._links(class_index, task.group):
                    flow = self._flow((class_index, self._class_load(class_index, task, task.seconds)))
                    for link, load in flow.path.items():
                        # Loads go up when bytes begin to flow and down at the end. The highest sum of a sweep over both
                        # is the peak.
                        changes.setdefault(link, []).append((end_s - task.seconds + flow.quiet_s, load))
                        changes[link].append((end_s, -load))
            # Without a quiet time, and at the peak from end to end: an upper bound. A false alarm
            # costs one more run with this action task by task, an overlooked one would make the step too fast.
            self._peaks[action] = Flow(0.0, {link: _highest(each) for link, each in changes.items()})
        return self._peaks[action]

    def shares(self, class_index: int, group: str) -> bool:
        """Whether a class's collectives of this group use shared links."""
        return bool(self._links(class_index, group))

    def message(self, message: Message) -> Flow:
        """What a message does to links."""
        sender, receiver, size_bytes, seconds = message
        network, classes = self.pricing.network, self.pricing.plan.classes
        source, target = classes[sender].rank, classes[receiver].rank
        # Most hops go the same kind of way. Those of equal size and seconds put the same on links, whoever sends.
        key = ("message", *way_of(network, source, target), size_bytes, seconds)
        sent = self._class_loads.get(key)
        if sent is None:
            load = message_load(network, source, target, size_bytes)
            sent = self._class_loads[key] = self._spread(load, seconds, (OUT, IN))
        # It leaves by the sender's links, whose numbers are even, and comes in by the receiver's, which are odd.
        first_link = (OF_CLASS * sender, OF_CLASS * receiver)
        return Flow(sent.quiet_s, {first_link[link % 2] + link: rate for link, rate in sent.rates_bytes_per_s})

    def _collective(self, collective: Collective) -> Flow:
        """All members take as long as the slowest, and each has its own bytes on its own links."""
        # The slowest part comes first, since `_flow` takes the first one's quiet time for all.
        parts = sorted(collective.parts, key=lambda part: -part[1].seconds)
        seconds = parts[0][1].seconds
        sharing = [(c, self._class_load(c, local, seconds)) for c, local in parts if self._links(c, local.group)]
        return self._flow(*sharing) if sharing else Flow(0.0, {})

    def _step(self, step: CollectiveStep) -> Flow:
        """One message of a collective, spread over its share of the whole's seconds."""
        path, quiet_s = dict[int, float](), 0.0
        for (c, local), way, share in ((step.sender, OUT, step.out), (step.receiver, IN, step.into)):
            if self._links(c, local.group):
                load = self._class_load(c, local, step.seconds)
                # The whole pays its starts once on each step of its longest chain, so a message pays its share of them.
                quiet_s = max(quiet_s, load.quiet_s / step.chain)
                path |= {OF_CLASS * c + link: rate * share for link, rate in load.rates_bytes_per_s if link % 2 == way}
        return Flow(quiet_s, path)

    def _flow(self, *sent: tuple[int, _ClassLoad]) -> Flow:
        """Several classes' loads as one flow, whose bytes flow when the first class's do."""
        flow = self._flows.get(sent)
        if flow is None:
            path = {OF_CLASS * c + link: rate for c, load in sent for link, rate in load.rates_bytes_per_s}
            flow = self._flows[sent] = Flow(sent[0][1].quiet_s, path)
        return flow

    def _waits_on_shared(self, action: WholeAction) -> bool:
        """Whether an action waits for communication on shared links, so that one task for all of it hides that."""
        class_index, program = action
        key = (self._context[class_index], program)
        if key not in self._waited_links:
            # Only what the action waits for can delay it. What it leaves running has tasks of its own where it matters.
            groups = {t.group for t in program.tasks if t.group and t.stream in program.joined}
            self._waited_links[key] = frozenset().union(*(self._links(class_index, group) for group in groups))
        return bool(self._waited_links[key])

    def _links(self, class_index: int, group: str) -> frozenset[str]:
        """The shared links that a class's group uses."""
        key = (self._context[class_index], group)
        if key not in self._group_links:
            rank = self.pricing.plan.classes[class_index].rank
            links = ("host",) if group == "host" else links_of(self.pricing.network, self.pricing.group(group, rank))
            self._group_links[key] = self.shared.intersection(links)
        return self._group_links[key]

    def _class_load(self, class_index: int, local: LocalTask, seconds: float) -> _ClassLoad:
        """What a collective that takes `seconds` puts on the links of a class that takes part."""
        # The context stands for the class: classes of one context lie alike and pay alike, so thousands of ranks share
        # a few entries.
        key = (self._context[class_index], local.group, local.kind, local.detail.bytes, local.choice, seconds)
        sent = self._class_loads.get(key)
        if sent is None:
            # A copy to or from the host goes one way. A ring sends and receives at once.
            directions = {"offload": (OUT,), "reload": (IN,)}.get(local.kind, (OUT, IN))
            sent = self._class_loads[key] = self._spread(self._load(class_index, local), seconds, directions)
        return sent

    def _load(self, class_index: int, local: LocalTask) -> Load:
        network, rank = self.pricing.network, self.pricing.plan.classes[class_index].rank
        if local.kind in HOST_COPIES:
            return copy_load(network, local.detail.bytes)
        ranks = self.pricing.group(local.group, rank)
        return collective_load(network, local.kind, ranks, local.detail.bytes, local.choice)

    def _spread(self, load: Load, seconds: float, directions: Iterable[int]) -> _ClassLoad:
        """A load over the seconds in which its bytes flow, on shared links alone."""
        flowing_s = load.flowing * seconds
        # A time of starts alone puts nothing on links.
        if flowing_s <= 0:
            return _ClassLoad(seconds, [])
        # Measured seconds may be shorter than the links allow: no link carries more than it can.
        rates = [
            (i, min(load.bytes[name] / flowing_s, self._carried[name]))
            for i, name in enumerate(LINKS)
            if name in load.bytes and name in self.shared
        ]
        # Starts are paid first and bytes flow to the end, as if in one stretch. NCCL's steps alternate both, which a
        # flow per collective cannot show.
        return _ClassLoad(seconds - flowing_s, [(2 * i + way, rate) for way in directions for i, rate in rates])


def _highest(changes: list[tuple[float, float]]) -> float:
    """The highest sum of loads; at one instant what ends comes first."""
    level = most = 0.0
    # At equal times a falling load sorts first, as it is negative. A communication that follows another on a stream
    # then does not count as beside it.
    for _, change in sorted(changes):
        level += change
        most = max(most, level)
    return most
