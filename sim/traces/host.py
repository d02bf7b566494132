"""Cut a host thread into a chain of segments: the innermost operator, or host time that no operator covers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct, field

from sim.traces.kineto import RUNTIME, Event

_BACKWARD = ("autograd::engine", "torch::autograd")


class Segment(NamedTuple):
    """Hold a segment of a thread. `owner`: the innermost operator, None if none runs. `kind`: F, B or OPTIMIZER."""

    start_ns: int
    end_ns: int
    owner: Event | None
    kind: str


class Thread(Struct):
    """Hold one thread within the step; `nodes[i]` is the node of `segments[i]`."""

    name: tuple[str, str]
    events: list[Event]
    segments: list[Segment]
    nodes: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def autograd(self) -> bool:
        """Tell whether this is autograd's own thread, which runs only backward."""
        return all(s.kind == "B" for s in self.segments if s.owner is not None)

    def before(self, time_ns: int) -> int:
        """Return the node of the last segment that ended by this time; -1 if there is none."""
        return self.nodes[i] if (i := bisect_right(self.ends, time_ns) - 1) >= 0 else -1

    def kind_at(self, time_ns: int) -> str:
        """Return the thread's kind of work at this time: F, B or OPTIMIZER."""
        i = bisect_left(self.ends, time_ns + 1)
        return self.segments[i].kind if i < len(self.segments) else "F"


def segments(events: Sequence[Event], begin_ns: int, end_ns: int) -> list[Segment]:
    """Cut a thread's time into segments that follow each other without gaps.

    Each event's start begins a segment. Annotations set the kind of the segments inside and own none. An event that
    ends after the event around it is cut at that event's end.

    Args:
        events: the events of one thread, in order of start; of equal starts the longer event first.
        begin_ns: start of the first segment.
        end_ns: end of the last segment.
    """
    out: list[Segment] = []
    open_: list[tuple[int, Event | None, str]] = []
    now = begin_ns

    def emit(until: int) -> None:
        nonlocal now
        if until > now:
            out.append(Segment(now, until, *(open_[-1][1:] if open_ else (None, "F"))))
            now = until

    for event in events:
        start = max(begin_ns, event.start_ns)
        if start >= end_ns:
            break
        while open_ and open_[-1][0] <= start:
            emit(open_[-1][0])
            open_.pop()
        emit(start)
        end = min(event.end_ns, end_ns, open_[-1][0] if open_ else end_ns)
        around = open_[-1][2] if open_ else "F"
        owner = None if event.category == "user_annotation" else event
        if owner is None and open_:
            owner = open_[-1][1]
        if end > start:
            open_.append((end, owner, _kind(event, around)))
    while open_:
        emit(open_[-1][0])
        open_.pop()
    emit(end_ns)
    return out


def _kind(event: Event, around: str) -> str:
    if event.name.startswith("Optimizer."):
        return "OPTIMIZER"
    return "B" if event.name.startswith(_BACKWARD) else around


def is_runtime(event: Event | None) -> bool:
    """Tell whether an event is a call of CUDA's or HIP's runtime or driver."""
    return event is not None and event.category in RUNTIME
