"""Plan + schedule + prices → task graph: every class of ranks goes through its action list, message by message.

Point-to-point messages have one task on both ends' streams. With `p2p_overlap: false` (as Megatron's blocking
send_forward_recv_backward) a rank posts after each action, as one batch, the send of its result and the receive
that its next action needs, and goes on when both are done; so a message starts when its producer has ended and
the receiver has posted. With overlap a message starts when its producer has ended; only the action that needs it waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sim.actions import Action, Kind, Overlap, Schedule
from sim.data_parallel import DP
from sim.plan import Plan
from sim.pricing import Pricing
from sim.program import Program
from sim.stages import Stage, epilogue, stage_input_bytes
from sim.taskgraph import Placed, Slot, TaskGraph
from sim.template import COMPUTE, LocalTask, Template, compile_program, interleave
from sim.timeline import Detail

SHOWN = {Kind.F: "F", Kind.B: "B", Kind.I: "B", Kind.W: "W"}


@dataclass(slots=True)
class _Rank:
    """Where one class of ranks stands while its list is walked. Task indices."""

    index: int
    last: dict[str, int] = field(default_factory=dict)  # last task on each stream
    waits: list[int] = field(default_factory=list)  # the next computation waits for these
    handles: dict[str, int] = field(default_factory=dict)  # communications still to be waited for
    collectives: dict[tuple[str, int], int] = field(default_factory=dict)  # how many so far, by group


@dataclass(slots=True)
class Built:
    """A task graph and what its placed templates add up to: (kind, source, uncertainty) → seconds, traffic, tasks of
    each action by (class, stage, kind, micro-batch): first and last."""

    graph: TaskGraph
    shares: dict[tuple[str, str, float], float]
    traffic: list[dict[tuple[str, str], float]]
    actions: dict[tuple[int, Action], tuple[int, int]]


class Build:
    """Walks all action lists; state is where each class stands and the messages and collectives under way."""

    def __init__(self, plan: Plan, schedule: Schedule, pricing: Pricing,
                 stages: list[dict[int, Stage]], expand: bool) -> None:
        self.plan, self.schedule, self.pricing, self.stages, self.expand = plan, schedule, pricing, stages, expand
        self.graph = TaskGraph(plan.classes)
        self.ranks = [_Rank(i) for i in range(len(plan.classes))]
        self.per_stage = len(plan.classes) // plan.scenario.parallelism.pp
        self.overlap = bool(plan.scenario.parallelism.p2p_overlap)
        self.pair_overlap = plan.scenario.parallelism.ep_overlap
        self.templates: dict[tuple[object, ...], Template] = {}
        self._alone: dict[tuple[object, ...], bool] = {}
        self._details: dict[tuple[object, ...], Detail] = {}
        self.messages: dict[tuple[int, int, int, bool], int] = {}  # (lane, producing stage, micro-batch, forward)
        self.shared: dict[tuple[str, tuple[int, ...], int], int] = {}
        self.shares: dict[tuple[str, str, float], float] = {}
        self.traffic: list[dict[tuple[str, str], float]] = [{} for _ in plan.classes]
        self.actions: dict[tuple[int, Action], tuple[int, int]] = {}
        self.neighbour = _neighbours(schedule)
        self.first, self.last_action = _ends(schedule)
        self.message_bytes = stage_input_bytes(plan)
        p = plan.scenario.parallelism
        self.wire_bytes = self.message_bytes / (p.tp if p.p2p_scatter and not p.sp else 1)

    def run(self) -> Built:
        """The whole step."""
        for rank in self.ranks:
            self._walk(rank)
        return Built(self.graph, self.shares, self.traffic, self.actions)

    def _walk(self, rank: _Rank) -> None:
        pipeline_rank = self.plan.classes[rank.index].pipeline_rank
        entries = self.schedule.ranks[pipeline_rank]
        for stage, held in self.stages[rank.index].items():
            self._place(rank, self._compiled(rank, held.prologue(f"{stage}")), "ALL_GATHER", stage, -1)
        for i, entry in enumerate(entries):
            actions = _actions(entry)
            if i == 0 or self.overlap:
                self._receive(rank, actions)
            self._run(rank, entry)
            sent = [m for a in actions for m in self._send(rank, a)]
            if not self.overlap:
                rank.waits += sent
                if i + 1 < len(entries):
                    self._receive(rank, _actions(entries[i + 1]))
        rank.waits += list(rank.handles.values())
        held_stages = tuple(self.stages[rank.index].values())
        ends = pipeline_rank in (0, self.plan.scenario.parallelism.pp - 1)
        tied = self.plan.scenario.model.tied_embeddings and self.plan.scenario.parallelism.pp > 1 and ends
        program = epilogue(held_stages, self.plan, tied)
        self._place(rank, self._compiled(rank, program), "OPTIMIZER", -1, -1)

    def _run(self, rank: _Rank, entry: Action | Overlap) -> None:
        """Place an action, or both of a pair at once."""
        together = (_actions(entry),) if self.pair_overlap else tuple((a,) for a in _actions(entry))
        for actions in together:
            name = "+".join(f"{SHOWN[a.kind]} of stage {a.stage}" for a in actions)
            ends = tuple((a.kind, a.micro_batch == self.first[a.stage], a == self.last_action[a.stage]) for a in actions)
            key = (rank.index, name, ends)
            if key not in self.templates:
                self.templates[key] = self._template(rank, actions)
            kind = "+".join(SHOWN[a.kind] for a in actions)
            span = self._place(rank, self.templates[key], kind, actions[0].stage, actions[0].micro_batch, key)
            for action in actions:
                self.actions[rank.index, action] = span

    def _template(self, rank: _Rank, actions: tuple[Action, ...]) -> Template:
        price = self.pricing.on(self.plan.classes[rank.index].rank)
        programs = [self._program(rank, a) for a in actions]
        if len(programs) == 2:
            return interleave(programs[0], programs[1], price)
        return compile_program(programs[0], price)

    def _program(self, rank: _Rank, action: Action) -> Program:
        stage = self.stages[rank.index][action.stage]
        forward = action.kind is Kind.F
        remote = self._source(action) is not None
        if forward:
            return stage.forward(action.micro_batch == self.first[action.stage], remote, f"{action.stage}")
        return stage.backward(action.kind, action == self.last_action[action.stage], remote, f"{action.stage}")

    def _compiled(self, rank: _Rank, program: Program) -> Template:
        return compile_program(program, self.pricing.on(self.plan.classes[rank.index].rank))

    # --- placing templates

    def _place(self, rank: _Rank, template: Template, kind: str, stage: int, micro_batch: int,
               key: tuple[object, ...] | None = None) -> tuple[int, int]:
        """Put a template into the graph at the end of what the rank does; returns its first and last task.

        `key` names a template that is placed again and again; without it all its tasks are shown.
        """
        for key, seconds in template.shares.items():
            self.shares[key] = self.shares.get(key, 0.0) + seconds
        traffic = self.traffic[rank.index]
        for wire, size in template.traffic.items():
            traffic[wire] = traffic.get(wire, 0.0) + size
        first = len(self.graph)
        if not template.tasks:
            return first, first
        if key is not None and self._stands_alone(rank, template, key):
            waits = self._after(rank, COMPUTE, rank.waits)
            slots = (Slot(rank.index, COMPUTE, kind),)
            task = self.graph.add(template.makespan_s, waits, Placed(
                slots, stage, micro_batch, self._details[key], template.compute_s, template.exposed_s))
            rank.last[COMPUTE], rank.waits = task, []
            return task, task
        return self._expand(rank, template, kind, stage, micro_batch)

    def _stands_alone(self, rank: _Rank, template: Template, key: tuple[object, ...]) -> bool:
        """Whether one task may stand for the template: nothing else runs on its streams, nobody shares its collectives."""
        if self.expand or not template.closed:
            return False
        if key not in self._alone:
            groups = {t.group for t in template.tasks if t.group}
            self._alone[key] = not any(len(self._members(rank, g)) > 1 for g in groups)
            whole = len(template.tasks) == 1
            self._details[key] = Detail(template.tasks[0].detail.name if whole else str(key[1]),
                                        source="+".join(dict.fromkeys(s for _, s, _ in template.shares)),
                                        note=template.detail)
        if not self._alone[key] or not rank.handles:
            return self._alone[key]
        busy = {self.graph.placed[i].slots[0].stream for i in rank.handles.values()}
        return not busy & template.streams

    def _expand(self, rank: _Rank, template: Template, kind: str, stage: int, micro_batch: int) -> tuple[int, int]:
        """Every task of a template. Parameter gathers (stream "dp") need no input of this micro-batch; the rest does."""
        ids: list[int] = []
        before, inputs = rank.last.get(COMPUTE), rank.waits
        rank.waits = []
        rooted: dict[int, None] = {}  # in order; all that needs this micro-batch's input
        for i, local in enumerate(template.tasks):
            waits = [ids[d] for d in local.deps]
            waits += [rank.handles.pop(h) for h in local.external if h in rank.handles]
            if not local.deps and before is not None:
                waits.append(before)
            if local.stream != DP:
                waits += [] if any(d in rooted for d in local.deps) else inputs
                rooted[i] = None
            computes = local.stream == COMPUTE
            ids.append(self._add(rank, local, kind if computes else local.kind, waits, stage, micro_batch))
        rank.handles.update((handle, ids[i]) for handle, i in template.open)
        rank.waits = [ids[i] for i in template.tail]
        first = next(iter(rooted), 0)
        last = template.tail[-1] if template.tail else max((i for i in rooted if template.tasks[i].stream == COMPUTE), default=-1)
        return ids[first], ids[last]

    def _add(self, rank: _Rank, local: LocalTask, kind: str, waits: list[int], stage: int, micro_batch: int) -> int:
        """One task of a template; a collective with other simulated ranks is one task for all of them."""
        members = self._members(rank, local.group) if local.group else (rank.index,)
        waits = self._after(rank, local.stream, waits)
        slot = Slot(rank.index, local.stream, kind)
        if len(members) == 1:
            compute_s = local.seconds if local.stream == COMPUTE else 0.0
            task = self.graph.add(local.seconds, waits,
                                  Placed((slot,), stage, micro_batch, local.detail, compute_s, 0.0))
        else:
            count = rank.collectives.get((local.group, members[0]), 0)
            rank.collectives[local.group, members[0]] = count + 1
            task = self._join((local.group, members, count), local, slot, waits, stage, micro_batch)
        rank.last[local.stream] = task
        return task

    def _join(self, key: tuple[str, tuple[int, ...], int], local: LocalTask, slot: Slot, waits: list[int],
              stage: int, micro_batch: int) -> int:
        task = self.shared.get(key)
        if task is None:
            placed = Placed((slot,), stage, micro_batch, local.detail, 0.0, 0.0)
            self.shared[key] = task = self.graph.add(local.seconds, waits, placed)
            return task
        self.graph.waits[task] += waits
        self.graph.seconds[task] = max(self.graph.seconds[task], local.seconds)
        placed = self.graph.placed[task]
        self.graph.placed[task] = placed._replace(slots=(*placed.slots, slot))
        return task

    def _members(self, rank: _Rank, group: str) -> tuple[int, ...]:
        """Classes that take part in this group's collectives with `rank`'s class."""
        if group == "host" or (self.per_stage == 1 and group not in ("embedding", "pp", "model")):
            return (rank.index,)
        ranks = self.pricing.group(group, self.plan.classes[rank.index].rank)
        return tuple(sorted({self.plan.class_of(r) for r in ranks}))

    def _after(self, rank: _Rank, stream: str, waits: Iterable[int]) -> list[int]:
        """What a task waits for, the last one on its stream first, each once."""
        last = rank.last.get(stream)
        return list(dict.fromkeys([last, *waits] if last is not None else waits))

    # --- messages

    def _source(self, action: Action) -> int | None:
        """The stage whose result on another rank this action needs, if there is one."""
        stage = self.neighbour[action.stage][0 if action.kind is Kind.F else 1]
        if action.kind is Kind.W or stage is None:
            return None
        rank_of = self.schedule.rank_of_stage
        return stage if rank_of[stage] != rank_of[action.stage] else None

    def _receive(self, rank: _Rank, actions: tuple[Action, ...]) -> None:
        """Post the receives of a rank's next action; it waits for them."""
        for action in actions:
            source = self._source(action)
            if source is not None:
                forward = action.kind is Kind.F
                rank.waits.append(self._message(rank, source, action.stage, action.micro_batch, forward, False))

    def _send(self, rank: _Rank, action: Action) -> list[int]:
        """Send an action's result to the rank that needs it; returns the message, if one is sent."""
        target = self.neighbour[action.stage][1 if action.kind is Kind.F else 0]
        rank_of = self.schedule.rank_of_stage
        if action.kind is Kind.W or target is None or rank_of[target] == rank_of[action.stage]:
            return []
        return [self._message(rank, action.stage, target, action.micro_batch, action.kind is Kind.F, True)]

    def _message(self, rank: _Rank, source: int, target: int, micro_batch: int, forward: bool, sends: bool) -> int:
        """The task of a message, made by whichever end comes first; adds this end's waits and slot to it."""
        lane = rank.index % self.per_stage
        key = (lane, source, micro_batch, forward)
        task = self.messages.get(key)
        rank_of = self.schedule.rank_of_stage
        name = _channel(rank_of[source], rank_of[target], forward, len(self.schedule.ranks))
        stream = ("send" if sends else "recv") + name
        kind = ("SEND" if sends else "RECV") + ("_F" if forward else "_B")
        waits = self._after(rank, stream, rank.waits) if sends else []
        if (sends or not self.overlap) and COMPUTE in rank.last:
            waits.append(rank.last[COMPUTE])
        slot = Slot(rank.index, stream, kind)
        if task is None:
            task = self.messages[key] = self._new_message(lane, source, target, micro_batch, waits, slot)
        else:
            self.graph.waits[task] += waits
            placed = self.graph.placed[task]
            slots = (slot, *placed.slots) if sends else (*placed.slots, slot)
            self.graph.placed[task] = placed._replace(slots=slots)
        if sends:
            rank.last[stream] = task
        return task

    def _new_message(self, lane: int, source: int, target: int, micro_batch: int, waits: list[int], slot: Slot) -> int:
        rank_of = self.schedule.rank_of_stage
        ends = [self.plan.classes[rank_of[s] * self.per_stage + lane].rank for s in (source, target)]
        priced = self.pricing.send(ends[0], ends[1], self.wire_bytes)
        share = ("send_recv", priced.source, priced.uncertainty)
        self.shares[share] = self.shares.get(share, 0.0) + priced.seconds
        detail = Detail(f"stage {source} to {target}", self.wire_bytes, priced.bus_bandwidth_bytes_per_s, priced.source)
        return self.graph.add(priced.seconds, waits, Placed((slot,), source, micro_batch, detail, 0.0, 0.0))


def _channel(source: int, target: int, forward: bool, p: int) -> str:
    """The stream that a message between two pipeline ranks queues on; V-shaped schedules send both ways."""
    usual = target == (source + 1) % p if forward else target == (source - 1) % p
    return ("_f" if forward else "_b") + ("" if usual else "_back")


def _actions(entry: Action | Overlap) -> tuple[Action, ...]:
    return (entry.forward, entry.backward) if isinstance(entry, Overlap) else (entry,)


def _neighbours(schedule: Schedule) -> dict[int, tuple[int | None, int | None]]:
    """Stage before and after each stage on its chain."""
    out: dict[int, tuple[int | None, int | None]] = {}
    for chain in schedule.chains:
        for before, stage, after in zip((None, *chain[:-1]), chain, (*chain[1:], None), strict=True):
            out[stage] = (before, after)
    return out


def _ends(schedule: Schedule) -> tuple[dict[int, int], dict[int, Action]]:
    """Per stage: the micro-batch whose forward runs first, and the action that completes its gradients."""
    first: dict[int, int] = {}
    last: dict[int, Action] = {}
    for entries in schedule.ranks:
        for entry in entries:
            for action in _actions(entry):
                if action.kind is Kind.F:
                    first.setdefault(action.stage, action.micro_batch)
                elif action.kind is not Kind.I:
                    last[action.stage] = action
    return first, last
