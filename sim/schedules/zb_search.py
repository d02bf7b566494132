"""Zero bubble by search: lists for given durations and a memory limit.

Ranks that are free choose among F, I and W as inputs arrive, by rules with three binary settings; the
best of the eight outcomes and of the handcrafted shapes that the limit allows (ZB-H1 at 1, ZB-H2 at 2, and
those between) is returned, by makespan: all ranks start at zero and the optimizer waits for all, so the skew
of ZB-H2 counts as bubble. If ranks do not wait for each other between two steps (`UnitTimes.apart`), the best is that
whose slowest rank takes the least time from its first action to its last, as in the paper's section 3.
Source: Qi et al. 2024 (arXiv 2401.10241, section 3.1: greedy rules and a grid over binary settings), and for the
warm-up their fork of Megatron-LM (auto_schedule.py, `manual_order`; zb_schedules.py, `scheduler`). Unlike theirs, the
greedy runs forward in time over all ranks, and a micro-batch's activations count as held until its W, without the part
that the paper's I frees. Left out: the integer program of section 3.2.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import product
from math import inf
from statistics import median_high

from msgspec import Struct

from sim.core.actions import Action, Kind, Schedule
from sim.schedules.form import ScheduleForm
from sim.schedules.list_writer import looped
from sim.schedules.unit_time import UnitTimes, at, evaluate
from sim.schedules.zb_h1 import split_backward


def zb_search(p: int, m: int, times: UnitTimes | None = None, memory: float = 1.0) -> Schedule:
    """The fastest lists found in which no rank holds more than `memory`·p micro-batches, 1F1B's rank 0 p.

    Raises:
        ValueError: if that is below one micro-batch.
    """
    times = times or UnitTimes()
    limit = int(memory * p + 1e-9)
    if limit < 1:
        raise ValueError(f"schedule zb_search: memory {memory} x p={p} is less than one micro-batch")
    lists = [_Greedy(p, m, times, limit, _Rules(*bits)).run() for bits in product((True, False), repeat=3)]
    sizes = [size for size in (p, 2 * p - 1, limit) if size <= limit]
    shapes = {(size, extra) for size in sizes for extra in (0, max(0, size - p))}
    lists += [_even_lag(p, m, size, extra) for size, extra in sorted(shapes)]
    found = (looped("zb_search", p, m, ranks) for ranks in lists)
    timed = [(evaluate(schedule, times), schedule) for schedule in found]
    return min(timed, key=lambda pair: pair[0].longest_rank_s if times.apart else pair[0].makespan_s)[1]


def _even_lag(p: int, m: int, size: int, extra: int) -> list[list[Action]]:
    """The handcrafted shape that holds `size` micro-batches: ZB-H1 for (p, 0), ZB-H2 for (2p−1, p−1)."""
    warm_up = [min(size, p - r + min(extra, p - 1 - r)) for r in range(p)]
    return [split_backward(r, m, warm_up[r], size - warm_up[r]) for r in range(p)]


class _Rules(Struct, frozen=True):
    """The paper's binary settings, as this greedy reads them."""

    forward_before_known_backward: bool  # start an F that ends after the next I could have started
    weight_in_short_gap: bool  # start a W that ends after the next F or I could have started
    backward_first: bool  # with both there, I always goes first; else F and I take turns


class _Rank(Struct):
    """Where a rank stands: what it did, and when the inputs known to be coming arrive."""

    forwards: deque[float]
    backwards: deque[float]
    actions: list[Action]
    f: int = 0
    i: int = 0
    w: int = 0
    free_s: float = 0.0


def _warm_ups(p: int, m: int, times: UnitTimes, limit: int, begins: bool) -> list[int]:
    """Forwards of each rank before its first I, at the median duration of all ranks.

    What memory holds, of those that begin (`begins`) or else end before that I can run; but fewer than the rank before
    it has, unless these are all or 1F1B's. From then on a forward follows each I.
    """
    forward, input_grad = (median_high([at(x, r) for r in range(p)]) for x in (times.forward_s, times.input_grad_s))
    counts, ready = [1] * p, p * forward + (p - 1) * times.message_s + input_grad
    for r in reversed(range(p - 1)):
        now, arrival = (r + 1) * forward + r * times.message_s, ready + times.message_s
        while counts[r] < min(m, limit) and (now < arrival if begins else now + forward <= arrival):
            counts[r] += 1
            now += forward
        ready = max(now, arrival) + input_grad
    for r in range(1, p):
        if counts[r] < m:
            counts[r] = max(min(p - r, limit), min(counts[r], counts[r - 1] - 1))
    return counts


class _Greedy:
    """Runs all ranks through time. Rank and stage are one; every rank takes its micro-batches in order."""

    def __init__(self, p: int, m: int, times: UnitTimes, limit: int, rules: _Rules) -> None:
        self.p, self.m, self.times, self.limit, self.rules = p, m, times, limit, rules
        # Rank 0 has the limit alone; `first_forwards` rests on that.
        self.warm_ups = [m, *_warm_ups(p, m, times, limit, rules.forward_before_known_backward)[1:]]
        self.ranks = [_Rank(deque([0.0] * m if r == 0 else []), deque(), []) for r in range(p)]
        self.wake = [(0.0, 0)]

    def run(self) -> list[list[Action]]:
        """The lists, by rank."""
        while self.wake:
            now, r = heapq.heappop(self.wake)
            if self.ranks[r].free_s <= now and (kind := self._choose(r, now)) is not None:
                self._start(r, kind, now)
        return [rank.actions for rank in self.ranks]

    def _choose(self, r: int, now: float) -> Kind | None:
        """Return what a free rank starts now; None to wait for an input that is coming."""
        rank = self.ranks[r]
        has_room = rank.f - rank.w < self.limit and rank.f - rank.i < self.warm_ups[r]
        forward_at = rank.forwards[0] if rank.forwards and has_room else inf
        backward_at = rank.backwards[0] if rank.backwards else inf
        last = rank.actions[-1].kind if rank.actions else Kind.W
        if backward_at <= now and (self.rules.backward_first or forward_at > now or last is Kind.F):
            return Kind.I
        if forward_at <= now:
            ends = now + at(self.times.forward_s, r)
            if backward_at <= now or ends <= backward_at or self.rules.forward_before_known_backward:
                return Kind.F
        if backward_at <= now:
            return Kind.I
        if rank.w < rank.i:
            ends = now + at(self.times.weight_grad_s, r)
            if ends <= min(forward_at, backward_at) or self.rules.weight_in_short_gap:
                return Kind.W
        return None

    def _start(self, r: int, kind: Kind, now: float) -> None:
        rank, times = self.ranks[r], self.times
        if kind is Kind.F:
            seconds, micro_batch = at(times.forward_s, r), rank.f
            rank.f += 1
            rank.forwards.popleft()
        elif kind is Kind.I:
            seconds, micro_batch = at(times.input_grad_s, r), rank.i
            rank.i += 1
            rank.backwards.popleft()
        else:
            seconds, micro_batch = at(times.weight_grad_s, r), rank.w
            rank.w += 1
        rank.actions.append(Action(r, kind, micro_batch))
        rank.free_s = now + seconds
        heapq.heappush(self.wake, (rank.free_s, r))
        if kind is not Kind.W:
            self._send(r, kind, rank.free_s)

    def _send(self, r: int, kind: Kind, done_s: float) -> None:
        """The result's arrival is known as soon as it is being computed; its taker then plans for it."""
        if kind is Kind.F and r == self.p - 1:
            self.ranks[r].backwards.append(done_s)  # on the rank itself, already due to wake then
            return
        taker = r + 1 if kind is Kind.F else r - 1
        if taker < 0:
            return
        arrival = done_s + self.times.message_s
        inbox = self.ranks[taker].forwards if kind is Kind.F else self.ranks[taker].backwards
        inbox.append(arrival)
        heapq.heappush(self.wake, (arrival, taker))


def first_forwards(
    memory: float, m: int, forward_s: Sequence[float], input_grad_s: Sequence[float], waits_s: float
) -> float:
    """Forwards that rank 0 runs before its first backward in all lists that `zb_search` chooses from, at the least.

    The handcrafted ones begin with as many as its limit and p allow. Its greedy ones go on with forwards until they
    know when a backward will come: not before one forward of every rank and the input gradients of ranks 2 and up.
    Seconds are the least of each rank; rank 0's forward takes up to `waits_s` more. Where that may be too long, 1.
    """
    count = min(len(forward_s), int(memory * len(forward_s) + 1e-9))
    known_s = float(sum(forward_s) + sum(input_grad_s[2:]))
    early = (count - 1) * (float(forward_s[0]) + waits_s) < known_s * (1 - 1e-9)
    return float(min(m, count)) if early else 1.0


FORM = ScheduleForm("zb_search", zb_search, follows_times=True, first_forwards=first_forwards)
