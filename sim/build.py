"""Plan + schedule + prices → task graph: every class of ranks goes through its action list, message by message.

Point-to-point messages have one task on both ends' streams. With `p2p_overlap: false` (as Megatron's blocking
send_forward_recv_backward) a rank posts after each action, as one batch, the send of its result and the receive
that its next action needs, and goes on when both are done; so a message starts when its producer has ended and
the receiver has posted. With overlap a message starts when its producer has ended; only the action that needs it
waits. Messages queue in the order in which a rank sends them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from sim.actions import Action, Kind, Overlap, Schedule
from sim.data_parallel import DP
from sim.faults import Jitter, jitter_of
from sim.messages import Messages, Row, Wire
from sim.plan import Plan
from sim.pricing import Pricing
from sim.program import Program
from sim.stages import Stage, epilogue
from sim.taskgraph import TaskGraph
from sim.template import COMPUTE, Launch, LocalTask, Price, Template, compile_program, interleave
from sim.timeline import Detail

K = TypeVar("K")
ACROSS_STAGES = ("embedding", "pp", "model", "copies")  # groups with members on several pipeline ranks
SHOWN = {Kind.F: "F", Kind.B: "B", Kind.I: "B", Kind.W: "W"}


class Done(NamedTuple):
    """Where an action stands in the graph: its first and last task (a rank's actions, in order)."""

    action: Action
    first: int
    last: int


class _Use(NamedTuple):
    """A template as one class of ranks uses it. `alone`: one task stands for it; `early`: part of it needs no input, so
    one task does so only where there is none to wait for. `inputs` and `outputs`: the messages before and after it,
    one for each action of a pair."""

    template: Template
    name: str
    alone: bool
    early: bool
    sort: int
    row: Row
    launches: tuple[tuple[Launch, int, Row], ...]
    inputs: tuple[Wire | None, ...]
    outputs: tuple[Wire | None, ...]


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
    uses: dict[tuple[object, ...], _Use] = field(default_factory=dict)
    counts: dict[Template, int] = field(default_factory=dict)  # how often each was placed
    done: list[Done] = field(default_factory=list)
    jitter: Jitter | None = None

    def ended(self) -> list[int]:
        """What the rank has done is done when these are; messages aside."""
        return [self.last[COMPUTE], *self.tail] if COMPUTE in self.last else list(self.tail)


@dataclass(frozen=True, slots=True)
class Built:
    """A task graph and what it was built from: seconds by (kind, source, uncertainty), bytes by (kind, group) of each
    class of ranks, and each class's actions in order."""

    graph: TaskGraph
    shares: dict[tuple[str, str, float], float]
    traffic: list[dict[tuple[str, str], float]]
    actions: list[list[Done]]


class Build:
    """Walks all action lists; its state is where each class stands and the messages and collectives under way."""

    def __init__(
        self, plan: Plan, schedule: Schedule, pricing: Pricing, stages: list[dict[int, Stage]], expand: bool
    ) -> None:
        self.plan, self.schedule, self.pricing, self.stages, self.expand = plan, schedule, pricing, stages, expand
        p = plan.scenario.parallelism
        self.graph = TaskGraph(plan.classes)
        self.ranks = [_Rank(i, jitter=jitter_of(plan.scenario, c.rank)) for i, c in enumerate(plan.classes)]
        self.lanes = plan.lanes
        self.overlap, self.pair = bool(p.p2p_overlap), p.ep_overlap
        self.templates: dict[tuple[object, ...], Template] = {}
        self.messages = Messages(plan, schedule, pricing, self.graph)
        self.shared: dict[tuple[str, tuple[int, ...], int], int] = {}
        self.shares: dict[tuple[str, str, float], float] = {}
        self.first, self.last = _ends(schedule)

    def run(self) -> Built:
        """The whole step."""
        for rank in self.ranks:
            self._walk(rank)
        traffic: list[dict[tuple[str, str], float]] = []
        _add_times(self.shares, self.messages.shares, 1)
        for rank in self.ranks:
            traffic.append({})
            members = len(self.plan.classes[rank.index].ranks)
            for template, count in rank.counts.items():
                _add_times(self.shares, template.shares, count * members)
                _add_times(traffic[-1], template.traffic, count)
        return Built(self.graph, self.shares, traffic, [r.done for r in self.ranks])

    def _walk(self, rank: _Rank) -> None:
        """One class of ranks: prologue, action list, epilogue."""
        pipeline_rank = self.plan.classes[rank.index].pipeline_rank
        held = self.stages[rank.index]
        for stage, what in held.items():
            self._once(rank, ("prologue", id(what)), what.prologue, "ALL_GATHER", stage)
        steps = self._steps(self.schedule.ranks[pipeline_rank])
        for i, actions in enumerate(steps):
            use = self._use(rank, actions)
            if i == 0 or self.overlap:
                self._receive(rank, use, actions)
            self._place(rank, use, actions)
            sent = [self._send(rank, w, a.micro_batch) for w, a in zip(use.outputs, actions, strict=True) if w]
            if not self.overlap:
                rank.waits += sent
                if i + 1 < len(steps):
                    self._receive(rank, self._use(rank, steps[i + 1]), steps[i + 1])
        rank.waits += rank.open.values()
        p, model = self.plan.scenario.parallelism, self.plan.scenario.model
        tied = model.tied_embeddings and p.pp > 1 and pipeline_rank in (0, p.pp - 1)
        stages = tuple(held.values())
        self._once(
            rank, ("epilogue", tied, *map(id, stages)), lambda: epilogue(stages, self.plan, tied), "OPTIMIZER", -1
        )

    def _steps(self, entries: tuple[Action | Overlap, ...]) -> list[tuple[Action, ...]]:
        """Entries as what runs together: pairs where they overlap, else one action after the other."""
        out: list[tuple[Action, ...]] = []
        for e in entries:
            if not isinstance(e, Overlap):
                out.append((e,))
            elif self.pair:
                out.append((e.forward, e.backward))
            else:
                out += [(e.forward,), (e.backward,)]
        return out

    # --- templates

    def _use(self, rank: _Rank, actions: tuple[Action, ...]) -> _Use:
        """The template of an action (or pair), compiled once for all ranks that run the same."""
        first, last = self.first, self.last
        if len(actions) == 1:
            s, k, m = actions[0]
            key: tuple[object, ...] = (s, k, m == first[s], m == last[s][0] and k == last[s][1])
        else:
            key = tuple((s, k, m == first[s], m == last[s][0] and k == last[s][1]) for s, k, m in actions)
        use = rank.uses.get(key)
        if use is None:
            use = rank.uses[key] = self._new_use(rank, actions)
        return use

    def _new_use(self, rank: _Rank, actions: tuple[Action, ...]) -> _Use:
        held, graph = self.stages[rank.index], self.graph
        rank_number = self.plan.classes[rank.index].rank
        ends = [(m == self.first[s], (m, k) == self.last[s]) for s, k, m in actions]
        key = (
            self.pricing.context(rank_number),
            *(
                (id(held[a.stage]), a.kind, *end, self.messages.needed_by(a) is not None)
                for a, end in zip(actions, ends, strict=True)
            ),
        )
        template = self.templates.get(key)
        if template is None:
            price = self.pricing.on(rank_number)
            programs = [self._program(rank, a, *end) for a, end in zip(actions, ends, strict=True)]
            template = self.templates[key] = (
                interleave(programs[0], programs[1], price, self._planned(rank))
                if len(programs) == 2
                else compile_program(programs[0], price)
            )
        expand = self.expand or rank.jitter is not None
        whole = not expand or not template.tasks  # an empty stage still has its action
        alone = template.alone and whole and not self._meets_others(rank, template)
        detail = Detail(
            " and ".join(f"{SHOWN[a.kind]} of stage {a.stage}" for a in actions),
            source=template.source,
            note=template.detail,
        )
        name = "+".join(SHOWN[a.kind] for a in actions)
        launches = tuple(
            (x, graph.new_sort(x.detail), graph.row(rank.index, x.stream, x.kind)) for x in template.launches
        )
        return _Use(
            template,
            name,
            alone,
            template.starts_on(DP),
            graph.new_sort(detail, template.compute_s, template.exposed_s),
            graph.row(rank.index, COMPUTE, name),
            launches,
            tuple(self.messages.end(rank.index, self.messages.needed_by(a), False) for a in actions),
            tuple(self.messages.end(rank.index, self.messages.result_of(a), True) for a in actions),
        )

    def _meets_others(self, rank: _Rank, template: Template) -> bool:
        """Whether another class of ranks takes part in the template's collectives."""
        if self.lanes == 1 and template.groups.isdisjoint(ACROSS_STAGES):
            return False
        return any(self._members(rank, g) for g in template.groups)

    def _planned(self, rank: _Rank) -> Price:
        """The prices by which overlapping actions are interleaved, the same for all lanes and with all faults off."""
        return self.pricing.healthy.on(self.plan.classes[rank.index // self.lanes * self.lanes].rank)

    def _program(self, rank: _Rank, action: Action, first: bool, last: bool) -> Program:
        stage = self.stages[rank.index][action.stage]
        remote = self.messages.needed_by(action) is not None
        if action.kind is Kind.F:
            return stage.forward(first, remote)
        return stage.backward(action.kind, last, remote)

    # --- placing templates

    def _once(
        self, rank: _Rank, key: tuple[object, ...], program: Callable[[], Program], kind: str, stage: int
    ) -> None:
        """Place a program that runs once a step, task by task; compiled once for all ranks that run the same."""
        rank_number = self.plan.classes[rank.index].rank
        key = (self.pricing.context(rank_number), *key)
        if key not in self.templates:
            self.templates[key] = compile_program(program(), self.pricing.on(rank_number))
        template = self.templates[key]
        if template.tasks:
            rank.counts[template] = rank.counts.get(template, 0) + 1
            ids = self._expand(rank, template, kind, stage, -1)[2]
            rank.handles.update(((stage, handle), ids[i]) for handle, i in template.open)

    def _place(self, rank: _Rank, use: _Use, actions: tuple[Action, ...]) -> None:
        """Put an action's tasks at the end of what the rank does: one where that comes to the same, else all."""
        template = use.template
        rank.counts[template] = rank.counts.get(template, 0) + 1
        stage, _, micro_batch = actions[0]
        free = not rank.open or rank.open.keys().isdisjoint(template.joined)
        if use.alone and free and not (use.early and rank.waits):
            graph, before = self.graph, rank.last
            waits, rank.waits, rank.tail = rank.waits, [], ()
            if COMPUTE in before:
                waits.append(before[COMPUTE])
            first = last = before[COMPUTE] = graph.add(template.makespan_s, waits, use.sort, stage, micro_batch)
            graph.slots.extend((first, *use.row))
            for launch, sort, row in use.launches:
                waits = [before[launch.stream]] if launch.stream in before else []
                task = graph.add(launch.seconds, waits, sort, stage, micro_batch)
                graph.lags[task] = (first, launch.lag_s)
                graph.slots.extend((task, *row))
                before[launch.stream] = rank.open[launch.stream] = task
        else:
            first, last, _ = self._expand(rank, template, use.name, stage, micro_batch)
        for action in actions:
            rank.done.append(Done(action, first, last))

    def _expand(
        self, rank: _Rank, template: Template, kind: str, stage: int, micro_batch: int
    ) -> tuple[int, int, list[int]]:
        """Every task of a template. Parameter gathers (stream "dp") need no input of this micro-batch; the rest does.

        Returns the first and last task of the action itself, and all of them.
        """
        ids: list[int] = []
        before, inputs = rank.ended(), rank.waits
        rank.waits = []
        rooted: dict[int, None] = {}  # in order; all that needs this micro-batch's input
        factor = rank.jitter.draw() if rank.jitter is not None else 1.0
        for i, local in enumerate(template.tasks):
            waits = [ids[d] for d in local.deps]
            waits += [rank.handles.pop((stage, h)) for h in local.external if (stage, h) in rank.handles]
            waits += [] if local.deps else before
            if local.stream != DP:
                waits += [] if any(d in rooted for d in local.deps) else inputs
                rooted[i] = None
            if rank.jitter is not None and local.stream == COMPUTE:
                local = local._replace(seconds=local.seconds * factor)
            ids.append(
                self._add(rank, local, kind if local.stream == COMPUTE else local.kind, waits, stage, micro_batch)
            )
        for _, i in template.open:
            rank.open[template.tasks[i].stream] = ids[i]
        rank.waits = [ids[i] for i in template.tail]
        rank.tail = tuple(rank.waits)
        first = next(iter(rooted), 0)
        ends = [i for i in template.tail if i in rooted]  # gathers may end long before
        last = ends[-1] if ends else max((i for i in rooted if template.tasks[i].stream == COMPUTE), default=-1)
        return ids[first], ids[last], ids

    def _add(self, rank: _Rank, local: LocalTask, kind: str, waits: list[int], stage: int, micro_batch: int) -> int:
        """One task of a template; a collective with other simulated ranks is one task for all of them."""
        graph = self.graph
        members = self._members(rank, local.group) if local.group else ()
        if local.stream in rank.last:
            waits.append(rank.last[local.stream])
        shared = None
        if len(members) > 1:
            count = rank.collectives.get((local.group, members), 0)
            rank.collectives[local.group, members] = count + 1
            key = (local.group, members, count)
            shared = self.shared.get(key)
        if shared is None:
            compute_s = local.seconds if local.stream == COMPUTE else 0.0
            task = graph.add(local.seconds, waits, graph.new_sort(local.detail, compute_s), stage, micro_batch)
            if len(members) > 1:
                self.shared[key] = task
        else:
            task = shared
            graph.waits[task] += waits
            graph.seconds[task] = max(graph.seconds[task], local.seconds)
        graph.slots.extend((task, *graph.row(rank.index, local.stream, kind)))
        rank.last[local.stream] = task
        return task

    def _members(self, rank: _Rank, group: str) -> tuple[int, ...]:
        """Classes that take part in this group's collectives with `rank`'s class; () if no other does."""
        if group == "host" or (self.lanes == 1 and group not in ACROSS_STAGES):
            return ()
        return self.pricing.member_classes(group, self.plan.classes[rank.index].rank)

    # --- messages

    def _receive(self, rank: _Rank, use: _Use, actions: tuple[Action, ...]) -> None:
        """Post the receives of a rank's next action; it waits for them. Without overlap they are posted when what it
        has done so far has ended."""
        posted = [] if self.overlap else rank.ended()
        for wire, action in zip(use.inputs, actions, strict=True):
            if wire is not None:
                rank.waits.append(self.messages.task(wire, action.micro_batch, list(posted)))

    def _send(self, rank: _Rank, wire: Wire, micro_batch: int) -> int:
        """Send a result that the rank has just computed; returns the message's task."""
        waits = [rank.last[COMPUTE], *rank.waits]
        if wire.queue in rank.last:
            waits.append(rank.last[wire.queue])
        rank.last[wire.queue] = task = self.messages.task(wire, micro_batch, waits)
        return task


def _add_times(total: dict[K, float], each: dict[K, float], count: int) -> None:
    for key, value in each.items():
        total[key] = total.get(key, 0.0) + value * count


def _ends(schedule: Schedule) -> tuple[dict[int, int], dict[int, tuple[int, Kind]]]:
    """Per stage: the micro-batch that runs forward first; micro-batch and kind of what ends its gradients."""
    first: dict[int, int] = {}
    last: dict[int, tuple[int, Kind]] = {}
    for entries in schedule.ranks:
        for entry in entries:
            for stage, kind, micro_batch in (entry,) if isinstance(entry, Action) else entry:
                if kind is Kind.F:
                    first.setdefault(stage, micro_batch)
                elif kind is not Kind.I:
                    last[stage] = (micro_batch, kind)
    return first, last
