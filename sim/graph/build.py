"""Plan + schedule + prices → task graph: every class of ranks goes through its action list, message by message.

Point-to-point messages have one task on both ends' streams. With `p2p_overlap: false` (as Megatron's blocking
send_forward_recv_backward) a rank posts after each action, as one batch, the send of its result and the receive
that its next action needs, and goes on when both are done; so a message starts when its producer has ended and
the receiver has posted. With overlap a message starts when its producer has ended; only the action that needs it
waits. Messages queue in the order in which a rank sends them.

Each class walks its list until it needs what another has not made yet, a message or a collective's last member, and
goes on when that is there. So tasks are numbered in an order in which they can run: each waits for earlier ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from sim.actions import Action, Kind, Overlap, Schedule
from sim.faults import Jitter, jitter_of
from sim.graph.data_parallel import DP
from sim.graph.link_book import LinkBook
from sim.graph.messages import Messages, Wire
from sim.graph.stages import Stage, epilogue
from sim.graph.taskgraph import TaskGraph
from sim.graph.template import COMPUTE, LocalTask, Template
from sim.graph.uses import Ends, Fit, Kept, Step, Use, Uses
from sim.plan import Plan
from sim.prices.pricing import Pricing
from sim.program import Program

K = TypeVar("K")
Key = int | tuple[str, tuple[int, ...], int]  # of a message; of a collective: group, members, how many before it
Walk = Iterator[Key]  # what a class of ranks waits for, each time that it has to


class Deadlock(ValueError):
    """Ranks wait for each other in a circle."""


class Acted(NamedTuple):
    """The actions of a class of ranks, in order, and where each stands in the graph: its first and last task."""

    actions: list[Action]
    first: list[int]
    last: list[int]


class _Arrival(NamedTuple):
    """A member of a collective that waits for the others."""

    class_index: int
    local: LocalTask
    waits: list[int]


@dataclass(slots=True)
class _Rank:
    """Where one class of ranks stands while its list is walked. Values are task indices."""

    index: int
    last: dict[str, int] = field(default_factory=dict)  # last task on each stream
    waits: list[int] = field(default_factory=list)  # the next computation waits for these
    tail: tuple[int, ...] = ()  # those of them that are the last action's own
    handles: dict[tuple[int, str], int] = field(default_factory=dict)  # gathers of the prologue, by stage
    open: dict[str, int] = field(default_factory=dict)  # last task on each stream that nobody has waited for
    collectives: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)  # so far, by group and members
    placed: list[Template] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    first: list[int] = field(default_factory=list)  # task of each step
    final: list[int] = field(default_factory=list)
    sorts: dict[tuple[Template, str, float], list[int]] = field(default_factory=dict)
    jitter: Jitter | None = None

    def ended(self) -> list[int]:
        """What the rank has done is done when these are; messages aside."""
        return [self.last[COMPUTE], *self.tail] if COMPUTE in self.last else list(self.tail)

    def acted(self) -> Acted:
        """All actions; a pair's two have the same tasks."""
        actions = [action for step in self.steps for action in step]
        if len(actions) == len(self.steps):
            return Acted(actions, self.first, self.final)
        columns = ([t for step, t in zip(self.steps, x, strict=True) for _ in step] for x in (self.first, self.final))
        return Acted(actions, *columns)


@dataclass(frozen=True, slots=True)
class Built:
    """A task graph and what it was built from: seconds by (kind, source, uncertainty), bytes by (kind, group) of each
    class of ranks, and each class's actions in order."""

    graph: TaskGraph
    shares: dict[tuple[str, str, float], float]
    traffic: list[dict[tuple[str, str], float]]
    actions: list[Acted]


class Build:
    """Walks all action lists; its state is where each class stands and the messages and collectives under way."""

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        pricing: Pricing,
        stages: list[dict[int, Stage]],
        expand: bool,
        links: LinkBook | None = None,
        kept: Kept | None = None,
    ) -> None:
        self.plan, self.schedule, self.pricing, self.stages = plan, schedule, pricing, stages
        p, jittery = plan.scenario.parallelism, jitter_of(plan.scenario, 0) is not None
        self.graph = TaskGraph(plan.classes)
        self.ranks = [_Rank(i, jitter=jitter_of(plan.scenario, c.rank)) for i, c in enumerate(plan.classes)]
        self.overlap, self.pair = bool(p.p2p_overlap), p.ep_overlap
        self.links = links
        self.messages = Messages(plan, schedule, pricing, self.graph, links)
        self.uses = Uses(
            plan, schedule, pricing, stages, self.graph, self.messages, expand or jittery, links, kept or Kept()
        )
        self.posted: dict[int, list[int]] = {}  # messages that one end is ready for, and when
        self.arrived: dict[Key, list[_Arrival]] = {}
        self.shared: dict[Key, int] = {}
        self.shares: dict[tuple[str, str, float], float] = {}

    def run(self) -> Built:
        """The whole step.

        Raises:
            Deadlock: if classes of ranks wait for each other in a circle; names what some wait for.
        """
        self._walk_all()
        traffic: list[dict[tuple[str, str], float]] = []
        _add_times(self.shares, self.messages.shares, 1)
        for rank in self.ranks:
            traffic.append({})
            members = len(self.plan.classes[rank.index].ranks)
            for template, count in Counter(rank.placed).items():
                _add_times(self.shares, template.shares, count * members)
                _add_times(traffic[-1], template.traffic, count)
        return Built(self.graph, self.shares, traffic, [r.acted() for r in self.ranks])

    def _walk_all(self) -> None:
        """All walks, each as far as it goes whenever it can go on."""
        walks = [self._walk(rank) for rank in self.ranks]
        self.waiting: dict[Key, list[Walk]] = {}
        self.ready = walks[::-1]
        while self.ready:
            walk = self.ready.pop()
            key = next(walk, None)
            if key is not None:
                self.waiting.setdefault(key, []).append(walk)
        if self.waiting:
            shown = ", ".join(self._describe(key) for key in list(self.waiting)[:5])
            raise Deadlock(
                f"deadlock: {len(self.waiting)} messages and collectives never start, the first are: {shown}"
            )

    def _describe(self, key: Key) -> str:
        return self.messages.describe(key) if isinstance(key, int) else f"collective {key[2]} of group {key[0]}"

    def _go_on(self, key: Key) -> None:
        """Let those go on who wait for a message or collective that is in the graph now."""
        self.ready += self.waiting.pop(key, ())

    def _walk(self, rank: _Rank) -> Walk:
        """One class of ranks: prologue, action list, epilogue."""
        pipeline_rank = self.plan.classes[rank.index].pipeline_rank
        held = self.stages[rank.index]
        for stage, what in held.items():
            yield from self._once(rank, ("prologue", id(what)), what.prologue, "ALL_GATHER", stage)
        steps = rank.steps = steps_of(self.schedule.ranks[pipeline_rank], self.pair)
        uses = self.uses.of(rank.index, steps)
        rank.placed += [use.fit.template for use in uses]
        go = self._go_overlapped if self.overlap else self._go_blocking
        yield from go(rank, steps, uses)
        rank.waits += rank.open.values()
        p, model = self.plan.scenario.parallelism, self.plan.scenario.model
        tied = model.tied_embeddings and p.pp > 1 and pipeline_rank in (0, p.pp - 1)
        stages = tuple(held.values())
        key = ("epilogue", tied, self.plan.group_size("copies"), *map(id, stages))
        yield from self._once(rank, key, lambda: epilogue(stages, self.plan, tied), "OPTIMIZER", -1)

    def _go_overlapped(self, rank: _Rank, steps: list[Step], uses: list[Use]) -> Walk:
        """Receive, act, send; a message is on its way when its producer has ended."""
        tasks, waiting, last, add = self.messages.tasks, self.waiting, rank.last, self.graph.add
        apart = self._apart if self.links is not None and self.links.apart != set() else None
        for step, use in zip(steps, uses, strict=True):
            for i, wire in use.inputs:
                key = wire.first_key + step[i][2]
                while tasks[key] < 0:
                    yield key
                rank.waits.append(tasks[key])
            if (apart and apart(rank, use, step)) or not self._act_alone(rank, use.fit, step):
                yield from self._act(rank, use.fit, step)
            for i, wire in use.outputs:
                queue, key = wire.queue, wire.first_key + step[i][2]
                waits = [last[COMPUTE], *rank.waits]
                if queue in last:
                    waits.append(last[queue])
                tasks[key] = last[queue] = add(wire.seconds, waits, wire.sort, step[i : i + 1])
                if key in waiting:
                    self._go_on(key)

    def _go_blocking(self, rank: _Rank, steps: list[Step], uses: list[Use]) -> Walk:
        """Act, post what is sent and what the next step receives, and wait for all of it."""
        before: tuple[Step, Ends] = ((), ())
        for step, use in zip(steps, uses, strict=True):
            yield from self._exchange(rank, *before, step, use.inputs)
            if self._apart(rank, use, step) or not self._act_alone(rank, use.fit, step):
                yield from self._act(rank, use.fit, step)
            before = (step, use.outputs)
        yield from self._exchange(rank, *before, (), ())

    def _exchange(
        self,
        rank: _Rank,
        done: Step,
        outputs: Ends,
        coming: Step,
        inputs: Ends,
    ) -> Walk:
        """Send the results of what is done, receive what is needed next, and wait for both."""
        sent = [(wire, done[i].micro_batch) for i, wire in outputs]
        received = [(wire, coming[i].micro_batch) for i, wire in inputs]
        for wire, micro_batch in sent:
            waits = [rank.last[COMPUTE], *rank.waits]
            if wire.queue in rank.last:
                waits.append(rank.last[wire.queue])
            self._post(wire, micro_batch, waits)
        for wire, micro_batch in received:
            self._post(wire, micro_batch, rank.ended())
        tasks = self.messages.tasks
        for wire, micro_batch in (*sent, *received):
            key = wire.first_key + micro_batch
            while tasks[key] < 0:
                yield key
            rank.waits.append(tasks[key])
        for wire, micro_batch in sent:
            rank.last[wire.queue] = tasks[wire.first_key + micro_batch]

    def _post(self, wire: Wire, micro_batch: int, waits: list[int]) -> None:
        """One end is ready for a message when `waits` have ended; it starts once the other end is, too."""
        key = wire.first_key + micro_batch
        if key not in self.posted:
            self.posted[key] = waits
            return
        waits = self.posted.pop(key) + waits
        step = (Action(wire.stage, Kind.F, micro_batch),)
        self.messages.tasks[key] = self.graph.add(wire.seconds, waits, wire.sort, step)
        self._go_on(key)

    def _once(
        self, rank: _Rank, key: tuple[object, ...], program: Callable[[], Program], kind: str, stage: int
    ) -> Walk:
        """Place a program that runs once a step, task by task; compiled once for all ranks that run the same."""
        template = self.uses.once(rank.index, key, program)
        if template.tasks:
            rank.placed.append(template)
            ids: list[int] = []
            yield from self._expand(rank, template, kind, (Action(stage, Kind.F, -1),), ids)
            rank.handles.update(((stage, handle), ids[i]) for handle, i in template.open)

    def _apart(self, rank: _Rank, use: Use, step: Step) -> bool:
        """Whether an action's communications share links with others, so that each needs its own task."""
        return self.links is not None and self.links.places_apart(rank.index, step[0], use.fit.template)

    def _act_alone(self, rank: _Rank, fit: Fit, step: Step) -> bool:
        """Put a step at the end of what the rank does, as one task where that comes to the same as all of them."""
        before, waits, stamp = rank.last, rank.waits, fit.stamp
        if not fit.alone or (fit.early and waits) or not rank.open.keys().isdisjoint(fit.template.joined):
            return False
        if COMPUTE in before:
            waits.append(before[COMPUTE])
        if fit.external:
            stage = step[0][0]
            waits += [rank.handles.pop((stage, h)) for h in fit.external if (stage, h) in rank.handles]
        rank.waits, rank.tail = [], ()
        task = before[COMPUTE] = self.graph.place(stamp, waits, before, step)
        for stream in stamp.streams:
            rank.open[stream] = before[stream]
        rank.first.append(task)
        rank.final.append(task)
        return True

    def _act(self, rank: _Rank, fit: Fit, step: Step) -> Walk:
        """Put a step at the end of what the rank does, task by task."""
        template = fit.template
        ids: list[int] = []
        rooted = yield from self._expand(rank, template, fit.name, step, ids)
        ends = [i for i in rooted if i in template.tail or template.tasks[i].stream == COMPUTE]  # gathers end before
        last = max(ends, key=template.ends_s.__getitem__, default=-1)
        rank.first.append(ids[next(iter(rooted), 0)])
        rank.final.append(ids[last])

    def _expand(
        self, rank: _Rank, template: Template, kind: str, step: Step, ids: list[int]
    ) -> Generator[Key, None, dict[int, None]]:
        """Add every task of a template, to `ids` too. Parameter gathers (stream "dp") need no input of this
        micro-batch; the rest does: these are returned, in order."""
        before, inputs, last, graph = rank.ended(), rank.waits, rank.last, self.graph
        rank.waits = []
        rooted: dict[int, None] = {}
        factor = rank.jitter.draw() if rank.jitter is not None else 1.0
        stage, sorts = step[0].stage, self._sorts(rank, template, kind, factor)
        for i, (local, sort) in enumerate(zip(template.tasks, sorts, strict=True)):
            stream, deps = local.stream, local.deps
            waits = [ids[d] for d in deps] if deps else before[:]
            if local.external:
                waits += [rank.handles.pop((stage, h)) for h in local.external if (stage, h) in rank.handles]
            if stream != DP:
                if rooted.keys().isdisjoint(deps):
                    waits += inputs
                rooted[i] = None
            if stream in last:
                waits.append(last[stream])
            if sort < 0:
                task = yield from self._meet(rank, local, waits, step)
            else:
                seconds = local.seconds * factor if stream == COMPUTE else local.seconds
                task = graph.add(seconds, waits, sort, step)
            last[stream] = task
            ids.append(task)
        for _, i in template.open:
            rank.open[template.tasks[i].stream] = ids[i]
        rank.waits = [ids[i] for i in template.tail]
        rank.tail = tuple(rank.waits)
        return rooted

    def _sorts(self, rank: _Rank, template: Template, kind: str, factor: float) -> list[int]:
        """The sort of each of a template's tasks; -1 where other simulated ranks take part."""
        key = (template, kind, factor)
        if key not in rank.sorts:
            meet = {g for g in template.groups if self.uses.members(rank.index, g)}
            rank.sorts[key] = [
                -1 if local.group in meet else self._sort(rank, local, kind, factor) for local in template.tasks
            ]
        return rank.sorts[key]

    def _sort(self, rank: _Rank, local: LocalTask, kind: str, factor: float) -> int:
        computes = local.stream == COMPUTE
        row = self.graph.row(rank.index, local.stream, kind if computes else local.kind)
        sort = self.graph.new_sort(local.detail, (row,), local.seconds * factor if computes else 0.0)
        if self.links is not None and local.group:
            self.links.collective(sort, (rank.index,), local)
        return sort

    def _meet(self, rank: _Rank, local: LocalTask, waits: list[int], step: Step) -> Generator[Key, None, int]:
        """A collective with other simulated ranks: one task for all of them, made when the last has arrived."""
        group, members = local.group, self.uses.members(rank.index, local.group)
        count = rank.collectives.get((group, members), 0)
        rank.collectives[group, members] = count + 1
        key = (group, members, count)
        arrived = self.arrived.setdefault(key, [])
        arrived.append(_Arrival(rank.index, local, waits))
        if len(arrived) < len(members):
            while key not in self.shared:
                yield key
            return self.shared[key]
        arrived.sort(key=lambda a: a.class_index)
        rows = tuple(self.graph.row(a.class_index, local.stream, local.kind) for a in arrived)
        sort = self.graph.new_sort(arrived[0].local.detail, rows)
        if self.links is not None:
            self.links.collective(sort, members, local)
        waits = [w for a in arrived for w in a.waits]
        task = self.graph.add(max(a.local.seconds for a in arrived), waits, sort, step)
        self.shared[key] = task
        self._go_on(key)
        return task


def steps_of(entries: tuple[Action | Overlap, ...], pair: bool) -> list[Step]:
    """Entries as what runs together: pairs where they overlap (`pair`), else one action after the other."""
    out: list[Step] = []
    for e in entries:
        if not isinstance(e, Overlap):
            out.append((e,))
        elif pair:
            out.append((e.forward, e.backward))
        else:
            out += [(e.forward,), (e.backward,)]
    return out


def _add_times(total: dict[K, float], each: dict[K, float], count: int) -> None:
    for key, value in each.items():
        total[key] = total.get(key, 0.0) + value * count
