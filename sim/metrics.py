"""Numbers out of a finished run: where each rank's seconds went, the critical path, utilization, certainty."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.graph.build import Built
from sim.graph.engine import Times
from sim.graph.taskgraph import TaskGraph, ints
from sim.graph.template import COMPUTE
from sim.plan import Plan
from sim.prices.profile import Profile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Intervals = Floats  # [n, 2]: start and end in seconds
MOST_NAMED = 1000  # ranks that are looked at for their name
NINETY_PERCENT = 1.645  # of a normal distribution, both sides


@dataclass(frozen=True, slots=True)
class RankSeconds:
    """One class of ranks: seconds computing, in F, B and W (`busy_s`, blocking messages inside them included),
    communicating with no computation beside, and idle for want of input until the last backward."""

    compute_s: float
    busy_s: float
    exposed_comm_s: float
    bubble_s: float


def union_s(intervals: Intervals) -> float:
    """Seconds covered by at least one interval."""
    if not len(intervals):
        return 0.0
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    begin = np.maximum(ordered[1:, 0], reach[:-1])
    return float(ordered[0, 1] - ordered[0, 0] + np.maximum(0.0, ordered[1:, 1] - begin).sum())


def uncovered_s(what: Intervals, by: Intervals) -> float:
    """Seconds of `what` that lie in no interval of `by`."""
    return max(0.0, union_s(np.concatenate([what, by])) - union_s(by))


def rank_seconds(built: Built, slots: Ints, start_s: Floats, end_s: Floats) -> list[RankSeconds]:
    """For every class of ranks; see `RankSeconds`. `slots`: the graph's table; `start_s`, `end_s`: of all tasks."""
    graph, ranks = built.graph, range(len(built.actions))
    compute = graph.streams.get(COMPUTE, -1)
    mine = slots[slots[:, 2] == compute]
    sort = np.array(graph.sort, dtype=np.int64)[mine[:, 0]]
    alone = (np.array(each)[sort] for each in ([s.compute_s for s in graph.sorts], [s.exposed_s for s in graph.sorts]))
    compute_s, inside_s = (np.bincount(mine[:, 1], column, len(ranks)).tolist() for column in alone)
    place, spans = _runs(slots, len(graph.streams), start_s, end_s)
    computes = place[:, 1] == compute
    ends = np.searchsorted(place[:, 0], np.arange(len(ranks) + 1))
    phase_end = max((float(end_s[a.last].max()) for a in built.actions if len(a.last)), default=0.0)
    out = []
    for i, acted, (a, b) in zip(ranks, built.actions, pairwise(ends.tolist()), strict=True):
        talking, at_work = spans[a:b][~computes[a:b]], spans[a:b][computes[a:b]]
        action = np.stack([start_s[acted.first], end_s[acted.last]], axis=1)
        busy = union_s(action)
        outside = union_s(np.concatenate([np.minimum(talking, phase_end), action])) - busy
        exposed = uncovered_s(talking, at_work) + inside_s[i]
        out.append(RankSeconds(compute_s[i], busy, exposed, max(0.0, phase_end - busy - max(0.0, outside))))
    return out


def _runs(slots: Ints, streams: int, start_s: Floats, end_s: Floats) -> tuple[Ints, Intervals]:
    """Stretches of tasks that follow each other at once: class of ranks and stream, in this order; start and end."""
    key = slots[:, 1] * streams + slots[:, 2]
    order = np.argsort(key.astype(np.min_scalar_type(int(key.max(initial=0)))), kind="stable")  # short: by digits
    key, task = key[order], slots[order, 0]
    start, end = start_s[task], end_s[task]
    first = np.append(True, (key[1:] != key[:-1]) | (start[1:] != end[:-1]))[: len(key)]
    spans = np.stack([start[first], end[np.append(first[1:], True)[: len(key)]]], axis=1)
    return np.stack(np.divmod(key[first], streams), axis=1), spans


def mean(values: Iterable[float], plan: Plan) -> float:
    """Mean over all ranks of a value per class, rounded once: the same however ranks are folded."""
    counts = [len(c.ranks) for c in plan.classes]
    return float(sum(Fraction(v) * n for v, n in zip(values, counts, strict=True)) / sum(counts))


def critical_path(built: Built, times: Times) -> tuple[dict[str, float], list[int]]:
    """Seconds by kind along the chain of tasks that fixes the step time, and that chain, first to last."""
    graph = built.graph
    if not len(graph):
        return {}, []
    task, before = int(times.end_s.argmax()), _deciding(graph, times).tolist()
    chain = [task]
    while (task := before[task]) >= 0:
        chain.append(task)
    chain.reverse()
    start_s = times.start_s[chain]
    lasts_s = np.append(start_s[1:], times.end_s[chain[-1]]) - start_s
    kinds = ints([s.rows[0][2] if s.rows else 0 for s in graph.sorts])[graph.sort[chain]]
    seconds = np.bincount(kinds, lasts_s, len(graph.kinds)).tolist()
    found = {name: seconds[i] for i, name in enumerate(graph.kinds) if (kinds == i).any()}
    return dict(sorted(found.items(), key=lambda kv: -kv[1])), chain


def _deciding(graph: TaskGraph, times: Times) -> Ints:
    """By task that whose end, or else whose start, let it start: of several the first listed; -1: none."""
    waits, launches, before = graph.columns.waits, graph.columns.launches, np.full(len(graph), -1)
    launched = times.start_s[launches.first] + launches.lag_s == times.start_s[launches.second]
    before[launches.second[launched]] = launches.first[launched]
    decides = np.flatnonzero(times.end_s[waits.first] == times.start_s[waits.second])[::-1]
    before[waits.second[decides]] = waits.first[decides]
    return before


def source_shares(shares: dict[tuple[str, str, float], float]) -> dict[str, float]:
    """Fraction of all priced seconds by where the price came from."""
    total = sum(shares.values())
    out = dict.fromkeys(("measured", "interpolated", "roofline", "topology"), 0.0)
    for (_, source, _), seconds in shares.items():
        out[source] = out.get(source, 0.0) + (seconds / total if total > 0 else 0.0)
    return out


def provenance(profile: Profile, shares: dict[tuple[str, str, float], float]) -> dict[str, Any]:
    """Where the prices of a result come from, as it says so."""
    return {
        "profile": profile.name,
        "source": profile.source,
        "date": profile.date,
        "hardware": dict(profile.hardware),
        "shares": source_shares(shares),
    }


def interval(step_time_s: float, shares: dict[tuple[str, str, float], float]) -> tuple[float, float]:
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


def text_of(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> text_of(range(8)), text_of(range(0, 127, 2)), text_of([0, 3, 4]), text_of([8, 9, 10, 12, 13, 14, 15])
    ('0-7', '0-126 by 2', '0, 3, 4', '8-10, 12-15')
    """
    if len(ranks) < 3:
        return ", ".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    if isinstance(ranks, range) or tuple(ranks) == tuple(range(ranks[0], ranks[0] + step * len(ranks), step or 1)):
        return f"{ranks[0]}-{ranks[-1]}" + (f" by {step}" if step > 1 else "")
    pieces: list[str] = []
    for _, run in groupby(enumerate(ranks[:MOST_NAMED]), key=lambda item: item[1] - item[0]):
        a, *rest = [rank for _, rank in run]
        pieces += [f"{a}-{rest[-1]}"] if len(rest) > 1 else map(str, [a, *rest])
    return ", ".join(pieces[:8]) + (" …" if len(pieces) > 8 or len(ranks) > MOST_NAMED else "")
