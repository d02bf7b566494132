"""What the papers on pipeline schedules count: forwards in flight, and bubbles of timed lists."""

from __future__ import annotations

from sim.core.actions import Kind, Schedule, parts
from sim.schedules.unit_time import Timed


def in_flight(schedule: Schedule, until: Kind = Kind.I) -> tuple[int, ...]:
    """Peak number of forwards (of one stage each) that a rank holds for their backward, per rank.

    A full backward B ends a hold. Where it is split, `until` says what does: I, after which what the input
    gradient alone needed is free, or W, after which nothing is held. An overlap's forward counts before its
    backward frees anything, as both run at once.

    Raises:
        ValueError: if `until` is neither I nor W.
    """
    if until not in (Kind.I, Kind.W):
        raise ValueError(f"until: {until!s} ends no hold; expected I or W")
    peaks = []
    for entries in schedule.ranks:
        held = peak = 0
        for entry in entries:
            for _, kind, _ in parts(entry):
                if kind is Kind.F:
                    held += 1
                    peak = max(peak, held)
                elif kind is Kind.B or kind is until:
                    held -= 1
        peaks.append(peak)
    return tuple(peaks)


def busy_s(timed: Timed) -> tuple[float, ...]:
    """Seconds each rank works."""
    return tuple(sum(e) - sum(s) for s, e in zip(timed.start_s, timed.end_s, strict=True))


def idle_s(timed: Timed) -> tuple[float, ...]:
    """Seconds each rank is idle from zero to the makespan: the bubble as `bubble_ratio` counts it."""
    return tuple(timed.makespan_s - busy for busy in busy_s(timed))


def inner_idle_s(timed: Timed) -> tuple[float, ...]:
    """Seconds each rank is idle between its own first start and last end: the zero-bubble paper's."""
    spans = ((s[0], e[-1]) for s, e in zip(timed.start_s, timed.end_s, strict=True))
    return tuple(end - start - busy for (start, end), busy in zip(spans, busy_s(timed), strict=True))


def bubble_ratio(timed: Timed) -> float:
    """Idle over busy, over the common makespan, all ranks together: (p−1)/m for GPipe and 1F1B."""
    return sum(idle_s(timed)) / sum(busy_s(timed))
