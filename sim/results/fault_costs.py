"""The seconds that each fault costs a step, and which ranks wait for which."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field

from sim.core.timeline import COMPUTE, SENDS
from sim.inputs.scenario import Scenario
from sim.ranks.faults import disturbs, has_jitter, link_scales, shared_nic_scales
from sim.results.records import Record
from sim.results.step import FinishedStep

if TYPE_CHECKING:
    from sim.inputs.faults_config import Faults, Straggler
    from sim.inputs.input_source import UserInput

ONE_BY_ONE = 16  # causes that are each taken away by themselves, a simulation each; those after them together
PAIRS = 12  # of ranks that wait for each other, the longest
ROUNDING = 1e-9  # of a step: what the order of additions leaves of a difference, or of no time at all


class Cause(Struct, frozen=True):
    """A fault in words, and what it is: straggler, link, jitter, network, rest or all."""

    kind: str
    name: str
    without: Faults  # the section with this fault taken away


class FaultCost(Record, frozen=True):
    """Seconds that a step loses to one fault (`kind` as in `Cause`), and the step's time without it."""

    kind: str
    cause: str
    lost_s: float
    without_s: float


class Waiting(Record, frozen=True):
    """Seconds for which one class of ranks stands still for another."""

    ranks: str
    awaited: str = field(name="for")
    seconds: float


class _Fault(Struct, frozen=True):
    """A cause before it is taken away: the key of `Faults` that holds it, and its entries there; None: the section, in
    whose place `left` stands without it."""

    kind: str
    name: str
    key: str
    entries: tuple[UserInput, ...] | None = None
    left: UserInput | None = None


def _found(scenario: Scenario, faults: Faults) -> Iterator[_Fault]:
    """Yield the faults that disturb a step, a rank's or a pair of nodes' entries together."""
    slow: dict[str, list[Straggler]] = {}  # by the rank or node
    for entry in faults.stragglers:
        slow.setdefault(entry.node or f"rank {entry.rank}", []).append(entry)
    for where, entries in slow.items():
        if (scale := math.prod(entry.compute_scale for entry in entries)) != 1:
            name = f"{where}, computing {scale:g} times as long"
            yield _Fault("straggler", name, "stragglers", tuple(entries))
    for pair, scale in link_scales(scenario).items():
        where = f"inside node{pair[0]}" if pair[0] == pair[1] else f"between node{pair[0]} and node{pair[1]}"
        links = tuple(x for x in faults.links if x.nodes == pair)
        cut = any(x.bandwidth_scale == 0 for x in links)
        lost = f"cut, {scale:.3g} of the bandwidth over the detour" if cut else f"{scale:.3g} of the bandwidth"
        yield _Fault("link", f"links {where}, {lost}", "links", links)
    for nic in faults.nics:
        which = "NICs" if nic.nic is None else f"NIC {nic.nic}"
        yield _Fault("nic", f"{which} of {nic.node}, {nic.bandwidth_scale:.3g} of the bandwidth", "nics", (nic,))
    if has_jitter(scenario) and faults.jitter is not None:
        name = "jitter as measured" if faults.jitter.factors else f"jitter of {faults.jitter.sigma:g}"
        yield _Fault("jitter", name, "jitter")
    if shared_nic_scales(scenario) and faults.network_jitter is not None:
        name = f"other jobs on the network, sigma {faults.network_jitter.sigma:g}"
        # Draws of no other jobs: without any draws the `spread` of a shared cluster would hold again.
        yield _Fault("network", name, "network_jitter", left=faults.network_jitter.model_copy(update={"sigma": 0.0}))


def _without(faults: Faults, gone: Sequence[_Fault]) -> Faults:
    """Return the section with these faults taken away."""
    for fault in gone:
        own = None if fault.entries is None else {id(x) for x in fault.entries}  # equal entries are told apart
        left = fault.left if own is None else tuple(x for x in getattr(faults, fault.key) if id(x) not in own)
        faults = faults.model_copy(update={fault.key: left})
    return faults


def causes(scenario: Scenario) -> list[Cause]:
    """The faults that disturb a step, the first `ONE_BY_ONE` by themselves, the rest together, then all of them."""
    faults = scenario.faults
    if faults is None or not disturbs(scenario):
        return []
    found = list(_found(scenario, faults))
    out = [Cause(x.kind, x.name, _without(faults, [x])) for x in found[:ONE_BY_ONE]]
    if rest := found[ONE_BY_ONE:]:
        out.append(Cause("rest", f"{len(rest)} more", _without(faults, rest)))
    return [*out, Cause("all", "all faults", _without(faults, found))]


def blame(step: FinishedStep, without_s: Callable[[Scenario], float]) -> tuple[FaultCost, ...]:
    """Seconds of the step lost to each fault: the step's time less what it is with that fault alone taken away, which
    `without_s` simulates.

    Losses do not add up to the loss to all faults where one hides another (two equally slow ranks: taking one away
    wins nothing) or where they meet (a slow rank on a slow link).
    """
    out = []
    for cause in causes(step.scenario):
        step_s = without_s(step.scenario.unchecked_copy(update={"faults": cause.without}))
        lost_s = step.step_time_s - step_s
        lost_s = 0.0 if abs(lost_s) < ROUNDING * step.step_time_s else lost_s
        out.append(FaultCost(cause.kind, cause.name, lost_s, step_s))
    return tuple(out)


def waiting(step: FinishedStep) -> tuple[Waiting, ...]:
    """Seconds for which ranks stood still for others: at collectives for the last to arrive, at messages for the
    sender (its work and the message itself). The longest pairs of classes; what computation hides is not counted.

    A rank may wait for one that itself waits: the slow rank's peers at its collectives, its neighbours for its peers.
    """
    waits = _Waits(step)
    for task in waits.computes:
        waits.stall(task)
    least_s = ROUNDING * step.step_time_s
    rows = sorted(((s, a, b) for (a, b), s in waits.lost.items() if s > least_s), reverse=True)
    return tuple(Waiting(step.names[a], step.names[b], s) for s, a, b in rows[:PAIRS])


class _Arrivals(Struct, frozen=True):
    """One message or collective: what each member waited for before it, and when that member was ready for it."""

    waits: dict[int, list[int]]
    ready_s: dict[int, float]
    last: int  # the member that was ready last


class _Waits:
    """A finished step, asked at each computation what its rank has waited for. Classes of ranks by index."""

    def __init__(self, step: FinishedStep) -> None:
        graph, times = step.built.graph, step.times
        self.waits, self.start, self.end = graph.waits_of, times.start_s.tolist(), times.end_s.tolist()
        self.members: list[list[int]] = [[] for _ in self.waits]
        self.computes: dict[int, None] = {}
        self.sender: dict[int, int] = {}  # of messages
        self.lost: dict[tuple[int, int], float] = {}  # seconds, by who waits for whom
        self._arrivals: dict[int, _Arrivals] = {}
        compute = graph.streams.get(COMPUTE, -1)
        messages = {i for kind, i in graph.span_kinds.items() if kind in SENDS}
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
            if not self.members[task]:
                return self._behind_messages(me, task, since_s)
            arrivals = self._arrived(task)
            self._lose(me, arrivals.last, self.start[task] - max(arrivals.ready_s.get(me, 0.0), since_s))
            waits = arrivals.waits.get(me, [])

    def _behind_messages(self, me: int, task: int, since_s: float) -> None:
        """Go back from the end of a collective that is messages, by the one that came last each time, to what began
        them: the computation or message of the member that was ready last."""
        while task not in self.computes and task not in self.sender:
            if not self.waits[task]:
                return
            task = max(self.waits[task], key=self.end.__getitem__)
        self._lose(me, self.members[task][0], self.end[task] - since_s)

    def _arrived(self, task: int) -> _Arrivals:
        """Sort what a collective waited for by member, once: each of its n members asks, and it waits for n others."""
        found = self._arrivals.get(task)
        if found is None:
            waits: dict[int, list[int]] = {c: [] for c in self.members[task]}
            for w in dict.fromkeys(self.waits[task]):  # members name the collective before this one each
                for c in self.members[w]:
                    if c in waits:
                        waits[c].append(w)
            ready_s = {c: max((self.end[w] for w in before), default=0.0) for c, before in waits.items()}
            found = self._arrivals[task] = _Arrivals(waits, ready_s, max(ready_s, key=ready_s.__getitem__))
        return found

    def _lose(self, who: int, whom: int, seconds: float) -> None:
        if seconds > 0 and who != whom:
            self.lost[who, whom] = self.lost.get((who, whom), 0.0) + seconds
