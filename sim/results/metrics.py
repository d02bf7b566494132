"""Numbers of a finished run: where each rank's seconds went, the critical path, the sources of prices, an interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sim.core.columns import Floats, Ints, ints, short
from sim.core.normal import NINETY_PERCENT
from sim.core.timeline import COMPUTE
from sim.engine.run import Times
from sim.graph.build import Built
from sim.graph.task_patterns import around
from sim.graph.taskgraph import TaskGraph, TimelineSlots, WholeAction
from sim.prices.profile import Profile
from sim.programs.priced_items import Shares
from sim.ranks.plan import Plan
from sim.results.records import Provenance

Intervals = Floats  # [n, 2]: start and end in seconds


class RankSeconds(Struct, frozen=True):
    """One class of ranks: seconds computing, in F, B and W (`busy_s`, blocking messages inside them included),
    communicating with no computation beside, and idle for want of input until the last backward."""

    compute_s: float
    busy_s: float
    exposed_comm_s: float
    bubble_s: float


class Spans(NamedTuple):
    """Intervals of time, each of a group (such as a class of ranks): the group, start and end in seconds."""

    group: Ints
    start_s: Floats
    end_s: Floats

    def only(self, rows: Ints | NDArray[np.bool_]) -> Spans:
        """The intervals of these rows: places in their order, or a truth for each interval."""
        return Spans(self.group[rows], self.start_s[rows], self.end_s[rows])

    def seconds(self, groups: int) -> Floats:
        """Return the sum of the lengths of each group's intervals, in seconds."""
        return _sums(self.group, self.end_s - self.start_s, groups)


def merged(spans: Spans) -> Spans:
    """The stretches that at least one interval of a group covers, by group and time."""
    group, start, reach = spans.only(np.lexsort((spans.start_s, short(spans.group))))
    switch = np.flatnonzero(group[1:] != group[:-1]) + 1
    for a, b in pairwise([0, *switch.tolist(), len(group)]):
        np.maximum.accumulate(reach[a:b], out=reach[a:b])
    begins = np.append(len(group) > 0, start[1:] > reach[:-1])
    begins[switch] = True
    begin = np.flatnonzero(begins)
    return Spans(group[begin], start[begin], reach[np.append(begin[1:] - 1, -1)[: len(begin)]])


def joined(sets: Sequence[Sequence[Spans]], groups: int) -> Spans:
    """The intervals of several sets; the groups of set i are numbered from `i * groups` on."""
    apart = [(i * groups + each.group, each.start_s, each.end_s) for i, those in enumerate(sets) for each in those]
    return Spans(*(np.concatenate(columns) for columns in zip(*apart, strict=True)))


def union_s(intervals: Intervals) -> float:
    """Seconds covered by at least one interval."""
    return float(merged(Spans(np.zeros(len(intervals), dtype=np.int64), *intervals.T)).seconds(1)[0])


def uncovered_s(what: Intervals, by: Intervals) -> float:
    """Seconds of `what` that lie in no interval of `by`."""
    return max(0.0, union_s(np.concatenate([what, by])) - union_s(by))


def rank_seconds(built: Built, times: Times) -> list[RankSeconds]:
    """For every class of ranks; see `RankSeconds`."""
    start_s, end_s = times.start_s, times.end_s
    classes, compute, places = len(built.actions), built.graph.streams.get(COMPUTE, -1), built.graph.slots
    compute_s, inside_s = _alone(built.graph, compute, classes, times.stretch)
    stream, runs = _runs(places, len(built.graph.streams), start_s, end_s)
    at_work = runs.only(stream == compute)  # one stream, whose tasks follow each other
    talking = merged(runs.only(stream != compute))
    actions, beside = _actions(built, times)
    acting = merged(actions)
    phase_end = acting.end_s.max(initial=0.0)
    early = [Spans(s.group, *(np.minimum(x, phase_end) for x in s[1:])) for s in (talking, *beside)]
    either, outside = (
        merged(joined([(talking, at_work), (*early, acting)], classes)).seconds(2 * classes).reshape(2, -1)
    )
    busy_s = acting.seconds(classes)
    exposed_s = np.maximum(0.0, either - at_work.seconds(classes)) + inside_s
    bubble_s = np.maximum(0.0, phase_end - np.maximum(busy_s, outside))
    columns = (compute_s, busy_s, exposed_s, bubble_s)
    return [RankSeconds(*row) for row in zip(*(x.tolist() for x in columns), strict=True)]


def _alone(graph: TaskGraph, compute: int, classes: int, stretch: Floats | None) -> tuple[Floats, Floats]:
    """Seconds of computation and of exposed communication inside actions that are one task, for every class of
    ranks. `stretch`: see `Times`."""
    task, row, rows = graph.slots
    mine = np.flatnonzero((rows[:, 1] == compute)[row])
    index, task_kind = rows[row[mine], 0], graph.task_kind[task[mine]]
    columns = [s.compute_s for s in graph.task_kinds], [s.exposed_s for s in graph.task_kinds]
    compute_s, inside_s = (np.array(x, dtype=np.float64)[task_kind] for x in columns)
    if stretch is not None:
        compute_s = compute_s * stretch[task[mine]]
    return _sums(index, compute_s, classes), _sums(index, inside_s, classes)


def _actions(built: Built, times: Times) -> tuple[Spans, tuple[Spans, Spans]]:
    """The actions of every class of ranks; and beside them what those that stand as one task gather before they begin
    and send after they end, which has tasks of its own where the actions' tasks stand one by one."""
    acted, graph = built.actions, built.graph
    first, last = np.concatenate([a.first for a in acted]), np.concatenate([a.last for a in acted])
    group = np.repeat(np.arange(len(acted)), [len(a.first) for a in acted])
    works = [kind.work for kind in graph.task_kinds]
    seconds = np.array([around(w.program) if isinstance(w, WholeAction) else (0.0, 0.0) for w in works])
    before_s, after_s = seconds[graph.task_kind[first], 0], seconds[graph.task_kind[last], 1]
    if times.stretch is not None:
        before_s, after_s = before_s * times.stretch[first], after_s * times.stretch[last]
    start_s, end_s = times.start_s[first], times.end_s[last]
    begin_s, finish_s = start_s + before_s, end_s - after_s
    beside = Spans(group, start_s, begin_s).only(before_s > 0), Spans(group, finish_s, end_s).only(after_s > 0)
    return Spans(group, begin_s, finish_s), beside


def _runs(places: TimelineSlots, streams: int, start_s: Floats, end_s: Floats) -> tuple[Ints, Spans]:
    """Stretches of tasks that follow each other at once, by class of ranks, then by stream: the streams, the spans."""
    key = short(places.rows[:, 0] * streams + places.rows[:, 1])[places.row]
    order = np.argsort(key, kind="stable")
    key, task = key[order], places.task[order]
    start, end = start_s[task], end_s[task]
    first = np.flatnonzero(np.append(len(key) > 0, (key[1:] != key[:-1]) | (start[1:] != end[:-1])))
    index, stream = np.divmod(key[first].astype(np.int64), streams)
    return stream, Spans(index, start[first], end[np.append(first[1:] - 1, -1)[: len(first)]])


def _sums(index: Ints, values: Floats, many: int) -> Floats:
    """Values summed by index, which is below `many`, one after the other."""
    return np.asarray(np.bincount(index, values, many), dtype=np.float64)


def mean(values: Iterable[float], plan: Plan) -> float:
    """Mean over all ranks; `values`: one for each class of equal ranks.

    The exact sum is rounded once, so that the result does not depend on which ranks share a class.
    """
    ratios = [v.as_integer_ratio() for v in values]
    whole = max(below for _, below in ratios)  # powers of two
    counts = [len(c.ranks) for c in plan.classes]
    total = sum(n * above * (whole // below) for n, (above, below) in zip(counts, ratios, strict=True))
    return total / (whole * sum(counts))


HELD_BACK = "PROCESS"  # the kind of what a process of the user's own keeps from starting


def critical_path(built: Built, times: Times) -> tuple[dict[str, float], list[int]]:
    """Seconds by kind along the chain of tasks that fixes the step time, and that chain, first to last.

    A first task that starts late was held back by a process of the user's own.
    """
    graph = built.graph
    if not len(graph):
        return {}, []
    task, before = int(times.end_s.argmax()), deciding(graph, times).data
    chain = [task]
    while (task := before[task]) >= 0:
        chain.append(task)
    chain.reverse()
    start_s = times.start_s[chain]
    lasts_s = np.append(start_s[1:], times.end_s[chain[-1]]) - start_s
    found = seconds_by_kind(graph, chain, lasts_s)
    if start_s[0] > 0:
        found[HELD_BACK] = float(start_s[0])
    return dict(sorted(found.items(), key=lambda kv: -kv[1])), chain


def seconds_by_kind(graph: TaskGraph, tasks: Sequence[int], seconds: Floats) -> dict[str, float]:
    """Return the seconds of tasks, summed by the kind of span that they are shown as, the most first."""
    kinds = ints([s.rows[0][2] if s.rows else 0 for s in graph.task_kinds])[graph.task_kind[tasks]]
    sums = np.bincount(kinds, seconds, len(graph.span_kinds)).tolist()
    found = {name: sums[i] for i, name in enumerate(graph.span_kinds) if (kinds == i).any()}
    return dict(sorted(found.items(), key=lambda kv: -kv[1]))


def deciding(graph: TaskGraph, times: Times) -> Ints:
    """Return for each task the one whose end, or else whose start, let it start: of several the first listed; -1:
    none."""
    waits, launches, before = graph.columns.waits, graph.columns.launches, np.full(len(graph), -1)
    if times.stretch is not None:  # a task may start later than all it waits for: the last of these counts
        order = np.argsort(times.end_s[waits.first], kind="stable")
        before[waits.second[order]] = waits.first[order]
    launched = times.start_s[launches.first] + launches.lag_s == times.start_s[launches.second]
    before[launches.second[launched]] = launches.first[launched]
    decides = np.flatnonzero(times.end_s[waits.first] == times.start_s[waits.second])[::-1]
    before[waits.second[decides]] = waits.first[decides]
    return before


def source_shares(shares: Shares) -> dict[str, float]:
    """Fraction of all priced seconds by where the price came from."""
    total = sum(shares.values())
    out = dict.fromkeys(("measured", "interpolated", "roofline", "topology"), 0.0)
    for (_, source, _), seconds in shares.items():
        out[source] = out.get(source, 0.0) + (seconds / total if total > 0 else 0.0)
    return out


def roofline_warnings(shares: Shares) -> list[str]:
    """Tell whether most of what GPUs and links take has nothing measured behind it; the host's own time is no part of
    it."""
    found = source_shares(shares)
    part = found["roofline"] / (1.0 - found.get("host", 0.0)) if found["roofline"] else 0.0
    if part <= 0.5:
        return []
    beside = " beside the host's" if found.get("host") else ""
    return [f"{part:.0%} of the time{beside} is priced by the roofline: an optimistic bound, nothing measured"]


def provenance(profile: Profile, shares: Shares, unknown: Mapping[str, int] | None = None) -> Provenance:
    """Origin of the prices of a result; `unknown`: launches of operators that are priced by their bytes alone."""
    hardware = dict(profile.hardware)
    return Provenance(profile.name, profile.source, profile.date, hardware, source_shares(shares), unknown)


def interval(step_time_s: float, shares: Shares) -> tuple[float, float]:
    """90 % interval of the step time from the prices' own uncertainty.

    Prices of one operator kind are taken to err together (they come from the same points or bound), different
    kinds independently, and an error of x % in a kind to move the step by its share of all priced seconds.
    Errors are taken as log-normal.
    """
    total = sum(shares.values())
    if total <= 0:
        return step_time_s, step_time_s
    by_kind: dict[str, float] = {}
    for (kind, _, uncertainty), seconds in shares.items():
        by_kind[kind] = by_kind.get(kind, 0.0) + uncertainty * seconds / total
    sigma = math.sqrt(sum(x * x for x in by_kind.values()))
    return step_time_s * math.exp(-NINETY_PERCENT * sigma), step_time_s * math.exp(NINETY_PERCENT * sigma)
