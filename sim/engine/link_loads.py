"""Find the loads of a step's communications on shared links, from the kinds of tasks in the finished graph.

Each class of ranks has its own links, so folded ranks count once. The prices of collectives already divide the links of
the network among GPUs; here the loads on each GPU's own links are compared with their capacity (`topology.shares`).
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from sim.core.timeline import HOST
from sim.engine.link_rates import Flow, Flows
from sim.graph.taskgraph import Collective, CollectiveStep, Message, TaskGraph, WholeAction
from sim.prices.profile import HOST_COPIES
from sim.prices.rank_prices import Pricing
from sim.programs.compile import CompiledProgram, LocalTask
from topology.shares import LINKS, Load, capacities, collective_load, copy_load, links_of, message_load, path_of

OUT, IN = 0, 1
# A link's number is OF_CLASS * class + 2 * position in LINKS + direction.
OF_CLASS = 2 * len(LINKS)  # number of links of a class of ranks: each of `LINKS`, out and in


class _ClassLoad(Struct, frozen=True, eq=False):
    """Hold a communication's load on the links of one class of ranks.

    `quiet_s`: as in `Flow`. `rates_bytes_per_s`: by the link's number among those of the class.
    """

    quiet_s: float
    rates_bytes_per_s: list[tuple[int, float]]


class LinkLoads:
    """Compute the loads of tasks on the links `shared`; results are kept for all graphs of one step."""

    def __init__(self, pricing: Pricing, shared: frozenset[str]) -> None:
        self.pricing, self.shared = pricing, shared
        self._carried = capacities(pricing.plan.scenario.cluster)
        by_link = [
            self._carried[name] * left.get(name, 1.0)
            # The loops nest in the order of the link's number: class, name, direction.
            for left in (pricing.network.own_links_left(c.rank) for c in pricing.plan.classes)
            for name in LINKS
            # Links are full duplex, so each direction has the whole capacity.
            for _ in (OUT, IN)
        ]
        self.capacity_bytes_per_s = dict(enumerate(by_link))
        # Classes of equal context have equal prices and places, so their loads are computed once.
        contexts: dict[tuple[object, ...], int] = {}
        self._context = [contexts.setdefault(pricing.context(c.rank), len(contexts)) for c in pricing.plan.classes]
        self._group_links: dict[tuple[int, str], frozenset[str]] = {}
        self._class_loads: dict[tuple[object, ...], _ClassLoad] = {}
        self._flows: dict[tuple[object, ...], Flow] = {}
        self._waited_links: dict[tuple[int, CompiledProgram], frozenset[str]] = {}
        self._peaks: dict[tuple[int, CompiledProgram], Flow] = {}

    def flows(self, graph: TaskGraph) -> Flows:
        """Return the flows of a graph's communications, by kind of task."""
        flows, steps = Flows(self.capacity_bytes_per_s), dict[CollectiveStep, Flow]()
        for number, kind in enumerate(graph.task_kinds):
            if isinstance(kind.work, Message):
                flow = self.message(kind.work)
            elif isinstance(kind.work, Collective):
                flow = self._collective(kind.work)
            elif isinstance(kind.work, CollectiveStep):
                flow = steps.get(kind.work) or steps.setdefault(kind.work, self._step(kind.work))
            else:
                continue
            # A communication without shared links is no flow: its end is known at its start.
            if flow.path:
                flows.by_task_kind[number] = flow
        return flows

    def hidden(self, graph: TaskGraph) -> dict[int, Flow]:
        """Return, by kind of task, the peak loads of actions that are one task and hide communication on shared
        links."""
        return {
            number: self.peak(kind.work)
            for number, kind in enumerate(graph.task_kinds)
            if isinstance(kind.work, WholeAction) and self._waits_on_shared(kind.work)
        }

    def peak(self, action: WholeAction) -> Flow:
        """Return the peak load on each link of the communication that an action waits for, with free streams before."""
        class_index, program = action
        if action not in self._peaks:
            # Communication that an action leaves running has its own tasks and flows.
            left = program.launch_streams
            changes: dict[int, list[tuple[float, float]]] = {}
            for task, end_s in zip(program.tasks, program.ends_s, strict=True):
                if task.group and task.stream not in left and self._links(class_index, task.group):
                    flow = self._flow((class_index, self._class_load(class_index, task, task.seconds)))
                    for link, load in flow.path.items():
                        # The load rises when bytes begin to flow and falls at the end.
                        changes.setdefault(link, []).append((end_s - task.seconds + flow.quiet_s, load))
                        changes[link].append((end_s, -load))
            # The action is assumed to have its peak load from start to end: an upper bound. A false alarm costs one
            # more run with this action task by task; a missed overload would make the step too fast.
            self._peaks[action] = Flow(0.0, {link: _highest(each) for link, each in changes.items()})
        return self._peaks[action]

    def shares(self, class_index: int, group: str) -> bool:
        """Tell whether a class's collectives of this group use shared links."""
        return bool(self._links(class_index, group))

    def message(self, message: Message) -> Flow:
        """Return the flow of a message."""
        sender, receiver, size_bytes, seconds = message
        network, classes = self.pricing.network, self.pricing.plan.classes
        source, target = classes[sender].rank, classes[receiver].rank
        # Messages with the same kind of route, size and seconds have equal loads, whoever sends.
        key = ("message", *path_of(network, source, target), size_bytes, seconds)
        sent = self._class_loads.get(key)
        if sent is None:
            load = message_load(network, source, target, size_bytes)
            sent = self._class_loads[key] = self._spread(load, seconds, (OUT, IN))
        # It uses the sender's outgoing links, with even numbers, and the receiver's incoming links, with odd numbers.
        first_link = (OF_CLASS * sender, OF_CLASS * receiver)
        return Flow(sent.quiet_s, {first_link[link % 2] + link: rate for link, rate in sent.rates_bytes_per_s})

    def _collective(self, collective: Collective) -> Flow:
        """Return the flow of a collective: all members take as long as the slowest, each with its own links' bytes."""
        # The slowest part comes first, because `_flow` takes the quiet time of the first.
        parts = sorted(collective.parts, key=lambda part: -part[1].seconds)
        seconds = parts[0][1].seconds
        # Most members of a group have one program and one context. Their load is looked up once for all of them, by the
        # identity of their task, because hashing its content would take longer.
        loads: dict[tuple[int, int], _ClassLoad | None] = {}
        sharing: list[tuple[int, _ClassLoad]] = []
        for c, local in parts:
            key = (self._context[c], id(local))
            if key not in loads:
                loads[key] = self._class_load(c, local, seconds) if self._links(c, local.group) else None
            load = loads[key]
            if load is not None:
                sharing.append((c, load))
        return self._flow(*sharing) if sharing else Flow(0.0, {})

    def _step(self, step: CollectiveStep) -> Flow:
        """Return the flow of one message of a collective, with its share of the collective's load."""
        path, quiet_s = dict[int, float](), 0.0
        for (c, local), way, share in ((step.sender, OUT, step.out), (step.receiver, IN, step.into)):
            if self._links(c, local.group):
                load = self._class_load(c, local, step.seconds)
                # The collective's latency is paid on each step of its longest chain; a message pays one step.
                quiet_s = max(quiet_s, load.quiet_s / step.chain)
                path |= {OF_CLASS * c + link: rate * share for link, rate in load.rates_bytes_per_s if link % 2 == way}
        return Flow(quiet_s, path)

    def _flow(self, *sent: tuple[int, _ClassLoad]) -> Flow:
        """Return several classes' loads as one flow, with the quiet time of the first class."""
        flow = self._flows.get(sent)
        if flow is None:
            path = {OF_CLASS * c + link: rate for c, load in sent for link, rate in load.rates_bytes_per_s}
            flow = self._flows[sent] = Flow(sent[0][1].quiet_s, path)
        return flow

    def _waits_on_shared(self, action: WholeAction) -> bool:
        """Tell whether an action waits for communication on shared links, which a single task would hide."""
        class_index, program = action
        key = (self._context[class_index], program)
        if key not in self._waited_links:
            # Only communication that the action waits for can delay it.
            groups = {t.group for t in program.tasks if t.group and t.stream in program.joined}
            self._waited_links[key] = frozenset().union(*(self._links(class_index, group) for group in groups))
        return bool(self._waited_links[key])

    def _links(self, class_index: int, group: str) -> frozenset[str]:
        """Return the shared links that a class's group uses."""
        key = (self._context[class_index], group)
        if key not in self._group_links:
            rank = self.pricing.plan.classes[class_index].rank
            links = ("host",) if group == HOST else links_of(self.pricing.network, self.pricing.group(group, rank))
            self._group_links[key] = self.shared.intersection(links)
        return self._group_links[key]

    def _class_load(self, class_index: int, local: LocalTask, seconds: float) -> _ClassLoad:
        """Return the load of a collective that takes `seconds` on the links of a class."""
        # The key has the context in place of the class: thousands of ranks share a few contexts.
        key = (self._context[class_index], local.group, local.kind, local.detail.bytes, local.choice, seconds)
        sent = self._class_loads.get(key)
        if sent is None:
            # A copy to or from the host has one direction. A ring sends and receives at once.
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
        """Divide a load's bytes by the seconds in which they flow, for shared links."""
        flowing_s = load.flowing * seconds
        # A communication of latency alone puts no load on links.
        if flowing_s <= 0:
            return _ClassLoad(seconds, [])
        # Measured seconds may be shorter than the links allow, so the rate is at most the capacity.
        rates = [
            (i, min(load.bytes[name] / flowing_s, self._carried[name]))
            for i, name in enumerate(LINKS)
            if name in load.bytes and name in self.shared
        ]
        # Latency is paid first, then the bytes flow to the end. NCCL's steps alternate the two; one flow for each
        # collective cannot show that.
        return _ClassLoad(seconds - flowing_s, [(2 * i + way, rate) for way in directions for i, rate in rates])


def _highest(changes: list[tuple[float, float]]) -> float:
    """Return the highest sum of loads."""
    level = most = 0.0
    # At equal times a falling load, which is negative, sorts first: a communication that follows another on a stream is
    # not beside it.
    for _, change in sorted(changes):
        level += change
        most = max(most, level)
    return most
