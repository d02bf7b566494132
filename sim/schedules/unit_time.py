"""When entries run if every action has a fixed duration: for the search and closed forms.

Not the simulator: no model, no topology, messages that only delay. A rank runs its list in order; an entry
starts when the one before it on its rank has ended and its inputs have arrived (messages posted ahead).
"""

from __future__ import annotations

from msgspec import Struct

from sim.core.actions import Entry, Kind, Links, Overlap, Schedule, in_turn, parts

Seconds = float | tuple[float, ...]


class UnitTimes(Struct, frozen=True):
    """Durations of one stage's actions, common to all schedule stages or one for each.

    A full backward takes input_grad_s + weight_grad_s. `message_s` delays each message between two ranks;
    `overlap_s` is an overlapped forward and backward (F&B), by default the sum of the two. `apart`: a rank begins the
    next step without waiting for the others.
    """

    forward_s: Seconds = 1.0
    input_grad_s: Seconds = 1.0
    weight_grad_s: Seconds = 1.0
    message_s: float = 0.0
    overlap_s: float | None = None
    apart: bool = False

    def of(self, entry: Entry) -> float:
        """Seconds an entry takes."""
        if isinstance(entry, Overlap) and self.overlap_s is not None:
            return self.overlap_s
        total = 0.0
        for stage, kind, _ in parts(entry):
            if kind is Kind.F:
                total += at(self.forward_s, stage)
            if kind in (Kind.I, Kind.B):
                total += at(self.input_grad_s, stage)
            if kind in (Kind.W, Kind.B):
                total += at(self.weight_grad_s, stage)
        return total


def at(value: Seconds, stage: int) -> float:
    """The value of one stage."""
    return value[stage] if isinstance(value, tuple) else value


class Timed(Struct, frozen=True):
    """Start and end of every entry, per rank, in the order of the lists."""

    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]

    @property
    def makespan_s(self) -> float:
        """From zero to the end of the last entry of any rank."""
        return max((ends[-1] for ends in self.end_s if ends), default=0.0)

    @property
    def longest_rank_s(self) -> float:
        """The most that any rank takes from the start of its first entry to the end of its last."""
        both = zip(self.start_s, self.end_s, strict=True)
        return max((ends[-1] - starts[0] for starts, ends in both if ends), default=0.0)


def evaluate(schedule: Schedule, times: UnitTimes | None = None) -> Timed:
    """Runs the lists, each entry as early as its rank and its inputs allow.

    Raises:
        ValueError: if lists wait for each other forever.
    """
    times, arrived = times or UnitTimes(), dict[int, float]()
    starts: list[list[float]] = [[] for _ in schedule.ranks]
    ends: list[list[float]] = [[] for _ in schedule.ranks]
    for rank, entry, takes, makes in in_turn(schedule, Links(schedule)):
        clock = max([ends[rank][-1] if ends[rank] else 0.0, *(arrived[message] for message, _ in takes)])
        starts[rank].append(clock)
        clock += times.of(entry)
        ends[rank].append(clock)
        for message, taker in makes:
            arrived[message] = clock + (times.message_s if taker != rank else 0.0)
    return Timed(tuple(map(tuple, starts)), tuple(map(tuple, ends)))
