"""SimPy's clock and events where the order of events at one instant matters, or their exact time.

SimPy's `succeed` queues an event at the usual priority alone, and its `timeout` adds seconds to the clock, which
rounds. So its events and its environment have subclasses here, which set what SimPy's own code sets (`Timeout`,
`Environment.schedule`). No other module touches what SimPy keeps to itself.
"""

from __future__ import annotations

import heapq

import simpy
from simpy.events import NORMAL, Event, EventPriority

LAST = EventPriority(2)  # after everything else at an instant: SimPy's own are 0 and 1


class Prompt(Event):
    """An event without a value that takes place at a priority of its own."""

    def happen(self, priority: EventPriority) -> None:
        """Take place at this instant."""
        self.mark_done()
        self.env.schedule(self, priority=priority)

    def mark_done(self) -> None:
        """Say that it has taken place, without queueing it."""
        self._ok, self._value = True, None


class Clock(simpy.Environment):
    """SimPy's environment, with events at an exact time: now + (time - now) would round."""

    def prompt(self) -> Prompt:
        """An event that has not taken place yet."""
        return Prompt(self)

    def at(self, time_s: float, priority: EventPriority = NORMAL) -> Event:
        """An event at `time_s`, or now if that is over."""
        event = self.prompt()
        event.mark_done()
        heapq.heappush(self._queue, (max(time_s, self.now), priority, next(self._eid), event))
        return event
