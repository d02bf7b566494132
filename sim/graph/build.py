"""Plan + schedule + prices → task graph: what every class of ranks runs, joined by messages and collectives.

Point-to-point messages have one task on both ends' streams. With `p2p_overlap: false` (as Megatron's blocking
send_forward_recv_backward) a rank posts after each action, as one batch, the send of its result and the receive
that its next action needs, and goes on when both are done; so a message starts when its producer has ended and
the receiver has posted. With overlap a message starts when its producer has ended; only the action that needs it
waits. Messages queue in the order in which a rank sends them.

Here each class of ranks lists what it runs as pieces: a prologue, its actions, an epilogue, each as one task where that
comes to the same as all of them (`template.Template.alone`), else one by one. `joined` lays them out and joins them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from sim.actions import Action, Kind, Schedule
from sim.faults import has_jitter, jitter_of
from sim.graph.joined import Joined
from sim.graph.link_book import LinkBook
from sim.graph.lists import Lists, RankList
from sim.graph.meetings import met
from sim.graph.messages import NO_HOP, Messages
from sim.graph.pieces import Pieces
from sim.graph.stages import Stage, epilogue
from sim.graph.taskgraph import Ints, Sorts, TaskGraph, ints
from sim.graph.template import Template
from sim.graph.uses import Fit, Kept, Uses
from sim.plan import Plan
from sim.prices.pricing import Pricing
from sim.program import Program

K = TypeVar("K")
Once = tuple[tuple[object, ...], Callable[[], Program], int]  # a program, by what decides it, and its stage


class Acted(NamedTuple):
    """What a class of ranks ran, and where each of its actions stands in the graph: its first and last task."""

    listed: RankList
    first: Ints
    last: Ints


@dataclass(frozen=True, slots=True)
class Built:
    """A task graph and what it was built from: seconds by (kind, source, uncertainty), bytes by (kind, group) of each
    class of ranks, and each class's actions in order."""

    graph: TaskGraph
    shares: dict[tuple[str, str, float], float]
    traffic: list[dict[tuple[str, str], float]]
    actions: list[Acted]


class Build:
    """Lists the pieces of all classes of ranks."""

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        pricing: Pricing,
        stages: list[dict[int, Stage]],
        lists: Lists,
        expand: bool,
        links: LinkBook | None,
        kept: Kept,
    ) -> None:
        self.plan, self.schedule, self.pricing, self.stages, self.links = plan, schedule, pricing, stages, links
        self.blocking, self.lists, self.shown = not plan.scenario.parallelism.p2p_overlap, lists, Sorts()
        self.messages = Messages(plan, schedule, pricing, self.shown, links)
        ends, expand = lists.first_and_last, expand or has_jitter(plan.scenario)
        self.uses = Uses(plan, ends, pricing, stages, self.shown, self.messages, expand, links, kept)
        self.pieces = Pieces(lists, self.uses)
        self._remote = self.messages.needs[self.lists.stage, self.lists.way] != NO_HOP
        self._alike = [self._steps_of_lane(lane) for lane in range(plan.lanes)]

    def _steps_of_lane(self, lane: int) -> tuple[Ints, list[list[int]]]:
        """Which steps run the same; see `Lists.alike`."""
        sorts, lanes = dict[tuple[int, int], int](), self.plan.lanes
        sort_of_stage = []
        for stage, rank in enumerate(self.schedule.rank_of_stage):
            held, first = (self.stages[rank * lanes + i][stage] for i in (lane, 0))
            sort_of_stage.append(sorts.setdefault((id(held), id(first)), len(sorts)))
        return self.lists.alike(ints(sort_of_stage), self._remote)

    def run(self) -> Built:
        """The whole step.

        Raises:
            Deadlock: if an action waits for what never comes; names some. A circle is found when the graph runs.
        """
        placed = [self._list(i) for i in range(len(self.plan.classes))]
        joined, now = Joined(self.pieces, self.messages, self.blocking), None
        columns = joined.columns
        if self.pieces.meetings:
            columns, now = met(columns, self.pieces.meetings, self.shown, self.links)
        graph = TaskGraph(self.plan.classes, self.shown, columns)
        shares, traffic = dict[tuple[str, str, float], float](), list[dict[tuple[str, str], float]]()
        for way in self.messages.all_ways():
            shares[way.share] = shares.get(way.share, 0.0) + way.total_s
        for c, templates in zip(self.plan.classes, placed, strict=True):
            traffic.append({})
            for template, count in templates.items():
                _add_times(shares, template.shares, count * len(c.ranks))
                _add_times(traffic[-1], template.traffic, count)
        acted = []
        for c, (first, last) in zip(self.plan.classes, joined.spans(now), strict=True):
            listed = self.lists.of_rank(c.pipeline_rank)
            acted.append(Acted(listed, first[listed.step], last[listed.step]))
        return Built(graph, shares, traffic, acted)

    def _list(self, class_index: int) -> dict[Template, int]:
        """The pieces of one class of ranks; its templates, each with how often it runs."""
        pipeline_rank, held = self.plan.classes[class_index].pipeline_rank, self.stages[class_index]
        self.pieces.begin_class(class_index, jitter_of(self.plan.scenario, self.plan.classes[class_index].rank))
        programs = [(("prologue", id(what)), what.prologue, stage) for stage, what in held.items()]
        before = self._once(class_index, "ALL_GATHER", programs)
        counts = self._steps(class_index, pipeline_rank, before)
        model, p, stages = self.plan.scenario.model, self.plan.scenario.parallelism, tuple(held.values())
        tied = model.tied_embeddings and p.pp > 1 and pipeline_rank in (0, p.pp - 1)
        key = ("epilogue", tied, self.plan.group_size("copies"), *map(id, stages))
        after = self._once(class_index, "OPTIMIZER", [(key, lambda: epilogue(stages, self.plan, tied), -1)])
        self.pieces.end_class(bool(after))
        templates = Counter(before)
        templates.update(counts)
        templates.update(after)
        return templates

    def _once(self, class_index: int, name: str, programs: Sequence[Once]) -> list[Template]:
        """Programs that run once a step, but for empty ones."""
        templates, rows = list[Template](), list[tuple[int, ...]]()
        for key, program, stage in programs:
            template = self.uses.once(class_index, key, program)
            if template.tasks:
                templates.append(template)
                rows.append((*self.pieces.one_by_one(template, name), len(self.pieces.steps), 0))
                self.pieces.steps.append((Action(stage, Kind.F, -1),))
        self.pieces.add(ints(rows).reshape(-1, 4).T)
        return templates

    def _steps(self, class_index: int, rank: int, before: list[Template]) -> dict[Template, int]:
        """A class's actions; their templates, in the order in which they come up, each with how often it runs."""
        begin, end = self.lists.begin[rank : rank + 2]
        alike, examples_of = self._alike[class_index % self.plan.lanes]
        examples = examples_of[rank]
        pick = alike[begin:end] - alike[examples[0]]  # a rank's numbers follow each other
        fits = [self.uses.of(class_index, self.lists.steps[i]) for i in examples]
        counts, templates = np.bincount(pick).tolist(), dict[Template, int]()
        for i in sorted(range(len(fits)), key=examples.__getitem__):
            templates[fits[i].template] = templates.get(fits[i].template, 0) + counts[i]
        alone = self._alone(class_index, fits, pick, range(begin, end), before)
        if all(alone) or not (any(alone) or self.pieces.jitter):
            shape, sorts_at = ints([self.pieces.step(fit, alone[0]) for fit in fits])[pick].T
        else:
            each = zip(pick.tolist(), alone, strict=True)
            shape, sorts_at = ints([self.pieces.step(fits[i], one) for i, one in each]).T
        self.pieces.add(np.stack([shape, sorts_at, np.arange(begin, end), np.ones(len(pick), dtype=np.int64)]))
        return templates

    def _alone(
        self, class_index: int, fits: list[Fit], pick: Ints, steps: range, before: list[Template]
    ) -> list[bool]:
        """Whether each step stands as one task. `before`: what the class runs before."""
        links = self.links
        apart = links is not None and links.apart != set()
        left = {stream for template in before for stream in _left(template)}
        ever = left.union(*(fit.stamp.streams for fit in fits))
        if not apart and all(fit.alone and not fit.early and ever.isdisjoint(fit.template.joined) for fit in fits):
            return [True] * len(pick)
        if not any(fit.alone for fit in fits):
            return [False] * len(pick)
        out, waits = list[bool](), bool(before and before[-1].tail)
        gives = self.messages.gives[self.lists.stage[steps], self.lists.way[steps]] != NO_HOP
        takes, gives = self._remote[steps].any(axis=1), self.blocking & gives.any(axis=1)
        for i, step, input_, output in zip(pick.tolist(), steps, takes.tolist(), gives.tolist(), strict=True):
            fit, waits = fits[i], waits or input_
            alone = fit.alone and not (fit.early and waits) and left.isdisjoint(fit.template.joined)
            if alone and apart and links is not None:
                alone = not links.places_apart(class_index, self.lists.steps[step][0], fit.template)
            left.update(fit.stamp.streams if alone else _left(fit.template))
            waits = output or not (alone or not fit.template.tail)
            out.append(alone)
        return out


def _left(template: Template) -> set[str]:
    """Streams on which a program placed task by task leaves something running."""
    return {template.tasks[i].stream for _, i in template.open}


def _add_times(total: dict[K, float], each: dict[K, float], count: int) -> None:
    for key, value in each.items():
        total[key] = total.get(key, 0.0) + value * count
