"""What faults cost a step, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sim.faults import compute_scales, disturbs, has_jitter, link_scales
from sim.finished import FinishedStep
from sim.graph.template import COMPUTE
from sim.inputs.scenario import Faults, Scenario

ONE_BY_ONE = 16  # causes that are each taken away by themselves, a simulation each; those after them together
PAIRS = 12  # of ranks that wait for each other, the longest
ROUNDING = 1e-9  # of a step: differences below are the order of additions


@dataclass(frozen=True, slots=True)
class Cause:
    """A fault in words, and what it is: straggler, link, jitter, rest or all."""

    kind: str
    name: str
    without: Faults | None  # the section with this fault taken away


def causes(scenario: Scenario) -> list[Cause]:
    """The faults that disturb a step, one by one (a rank's or a pair of nodes' entries together), then all of them."""
    faults = scenario.faults
    if faults is None or not disturbs(scenario):
        return []
    out = []
    for rank, scale in compute_scales(scenario).items():
        left = tuple(s for s in faults.stragglers if s.rank != rank)
        without = faults.model_copy(update={"stragglers": left})
        out.append(Cause("straggler", f"rank {rank}, computing {scale:g} times as long", without))
    for pair, scale in link_scales(scenario).items():
        names = {f"node{n}" for n in pair}
        without = faults.model_copy(update={"links": tuple(x for x in faults.links if set(x.between) != names)})
        where = f"inside node{pair[0]}" if pair[0] == pair[1] else f"between node{pair[0]} and node{pair[1]}"
        cut = any(set(x.between) == names and x.bandwidth_scale == 0 for x in faults.links)
        lost = f"cut, {scale:.3g} of the bandwidth over the detour" if cut else f"{scale:.3g} of the bandwidth"
        out.append(Cause("link", f"links {where}, {lost}", without))
    if has_jitter(scenario) and faults.jitter is not None:
        without = faults.model_copy(update={"jitter": None})
        name = "jitter as measured" if faults.jitter.factors else f"jitter of {faults.jitter.sigma:g}"
        out.append(Cause("jitter", name, without))
    if len(out) > ONE_BY_ONE:
        out = [*out[:ONE_BY_ONE], _rest(scenario, faults, len(out) - ONE_BY_ONE)]
    return [*out, Cause("all", "all faults", None)]


def _rest(scenario: Scenario, faults: Faults, count: int) -> Cause:
    """All but the first `ONE_BY_ONE` causes together."""
    kept = {*list(compute_scales(scenario))[:ONE_BY_ONE]}
    pairs = {*list(link_scales(scenario))[: max(0, ONE_BY_ONE - len(compute_scales(scenario)))]}
    links = tuple(x for x in faults.links if tuple(sorted(int(n.removeprefix("node")) for n in x.between)) in pairs)
    stragglers = tuple(s for s in faults.stragglers if s.rank in kept)
    update = {"stragglers": stragglers, "links": links, "jitter": None}
    return Cause("rest", f"{count} more", faults.model_copy(update=update))


def blame(step: FinishedStep, without_s: Callable[[Scenario], float]) -> list[dict[str, Any]]:
    """Seconds of the step lost to each fault: the step's time less what it is with that fault alone taken away, which
    `without_s` simulates.

    Losses do not add up to the loss to all faults where one hides another (two equally slow ranks: taking one away
    wins nothing) or where they meet (a slow rank on a slow link).
    """
    out = []
    for cause in causes(step.scenario):
        step_s = without_s(step.scenario.model_copy(update={"faults": cause.without}))
        lost_s = step.step_time_s - step_s
        lost_s = 0.0 if abs(lost_s) < ROUNDING * step.step_time_s else lost_s
        out.append({"kind": cause.kind, "cause": cause.name, "lost_s": lost_s, "without_s": step_s})
    return out


def waiting(step: FinishedStep) -> list[dict[str, Any]]:
    """Seconds for which ranks stood still for others: at collectives for the last to arrive, at messages for the
    sender (its work and the message itself). The longest pairs of classes; what computation hides is not counted.

    A rank may wait for one that itself waits: the slow rank's peers at its collectives, its neighbours for its peers.
    """
    waits = _Waits(step)
    for task in waits.computes:
        waits.stall(task)
    least_s = ROUNDING * step.step_time_s
    rows = sorted(((s, a, b) for (a, b), s in waits.lost.items() if s > least_s), reverse=True)
    return [{"ranks": step.names[a], "for": step.names[b], "seconds": s} for s, a, b in rows[:PAIRS]]


class _Waits:
    """A finished step, asked at each computation what its rank has waited for. Classes of ranks by index."""

    def __init__(self, step: FinishedStep) -> None:
        graph, times = step.built.graph, step.times
        self.waits, self.start, self.end = graph.waits_of, times.start_s.tolist(), times.end_s.tolist()
        self.members: list[list[int]] = [[] for _ in self.waits]
        self.computes: dict[int, None] = {}
        self.sender: dict[int, int] = {}  # of messages
        self.lost: dict[tuple[int, int], float] = {}  # seconds, by who waits for whom
        compute = graph.streams.get(COMPUTE, -1)
        messages = {i for name, i in graph.kinds.items() if name.startswith(("SEND_F", "SEND_B"))}
        for task, c, stream, kind in graph.slot_table().tolist():
            self.members[task].append(c)
            if stream == compute:
                self.computes[task] = None
            if kind in messages:
                self.sender[task] = c

    def stall(self, task: int) -> None:
        """Go back from a computation through the messages and collectives it waited for, until its rank computed."""
        me = self.members[task][0]
        waits = self.waits[task]
        since_s = max((self.end[w] for w in waits if w in self.computes), default=0.0)
        while True:
            task = max(waits, key=self.end.__getitem__, default=-1)
            if task < 0 or task in self.computes or self.end[task] <= since_s:
                return
            if task in self.sender:
                return self._lose(me, self.sender[task], self.end[task] - since_s)
            ready = {c: self._ready(task, c) for c in self.members[task]}
            last = max(ready, key=ready.__getitem__)
            self._lose(me, last, self.start[task] - max(ready.get(me, 0.0), since_s))
            waits = [w for w in self.waits[task] if me in self.members[w]]

    def _ready(self, task: int, c: int) -> float:
        return max((self.end[w] for w in self.waits[task] if c in self.members[w]), default=0.0)

    def _lose(self, who: int, whom: int, seconds: float) -> None:
        if seconds > 0 and who != whom:
            self.lost[who, whom] = self.lost.get((who, whom), 0.0) + seconds
