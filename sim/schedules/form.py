"""The record that each schedule's file declares: how its lists are built, and which sizes they take.

All else is read off built lists: stages per rank, copies of the model, how backwards run, forwards before the first
backward. Three things hold for every schedule and are tested for all: lists of any legal size have the same stages per
rank and the same kinds of backward; lists for 2p micro-batches begin like longer ones, unless more micro-batches make
the example's ranks begin with more forwards (`tests/sim/schedules/test_schedule_forms.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from sim.core.actions import Kind, Overlap, Schedule, parts
from sim.core.units import counted
from sim.schedules.unit_time import UnitTimes

Backward = Literal["whole", "split", "mixed"]


def _one(p: int) -> int:
    return 1


class ScheduleForm(Struct, frozen=True, eq=False, dict=True):
    """A pipeline schedule, for p pipeline ranks, m micro-batches and v stages per rank.

    `lists(p, m)` builds it; `lists(p, m, v)` where `least_stages` gives the choice of v from that number on;
    `lists(p, m, times, memory)` where the order of its actions follows their seconds (`follows_times`).
    p must be a multiple of `ranks_multiple`, m one of `micro_batches_multiple(p)` and at least
    `fewest_micro_batches(p)`. `blocking_sends`: ranks wait for their messages unless a scenario says otherwise.

    `first_forwards(memory, m, forward_s, input_grad_s, waits_s)` is for schedules that follow times: forwards of rank 0
    before its first backward, at the least, from seconds by rank; None where that is not known.

    `in_groups_of(n)` makes the lists of n micro-batches that a stage takes in a row, where a scenario may choose.

    `in_pairs` makes the lists in which ranks run a forward and a backward at once, of a schedule that has them one
    after the other unless a scenario hides expert exchanges in them.
    """

    name: str
    lists: Callable[..., Schedule]
    least_stages: int | None = None
    ranks_multiple: int = 1
    micro_batches_multiple: Callable[[int], int] = _one
    fewest_micro_batches: Callable[[int], int] = _one
    blocking_sends: bool = False
    follows_times: bool = False
    first_forwards: Callable[..., float] | None = None
    in_groups_of: Callable[[int], Callable[..., Schedule]] | None = None
    in_pairs: Callable[..., Schedule] | None = None

    @cached_property
    def paired(self) -> ScheduleForm:
        """The schedule whose ranks run a forward and a backward at once; itself, where they do already or cannot."""
        if self.in_pairs is None:
            return self
        return replace(self, lists=self.in_pairs, in_groups_of=None, in_pairs=None)

    @cache  # noqa: B019  (forms live as long as the program)
    def grouped(self, n: int) -> ScheduleForm:
        """The schedule with n micro-batches that a stage takes in a row, for any number of micro-batches."""
        if self.in_groups_of is None:
            raise ValueError(f"schedule {self.name} has no groups of micro-batches")
        lists = self.in_groups_of(n)
        return replace(self, lists=lists, micro_batches_multiple=_one, fewest_micro_batches=_one)

    def build(
        self, p: int, m: int, v: int | None = None, times: UnitTimes | None = None, memory: float = 1.0
    ) -> Schedule:
        """The lists; v None: the least number of stages per rank. `times`, `memory`: see `sim.schedules.build`.

        Raises:
            ValueError: if p, m or v do not suit the schedule; says what does.
        """
        if p < 1 or m < 1:
            raise ValueError(f"schedule {self.name}: p={p}, m={m}: needs one or more ranks and micro-batches")
        if problem := self.ranks_problem(p):
            raise ValueError(f"schedule {self.name}: p={p} ranks {problem}")
        if problem := self.micro_batches_problem(p, m):
            raise ValueError(f"schedule {self.name}: m={m} micro-batches {problem}")
        if v is not None and (problem := self.stages_problem(v)):
            raise ValueError(f"schedule {self.name}: v={v}: {problem}")
        if self.follows_times:
            return self.lists(p, m, times, memory)
        return self.lists(p, m) if self.least_stages is None else self.lists(p, m, v or self.least_stages)

    def ranks_problem(self, p: int) -> str | None:
        """Say what is wrong with p pipeline ranks, as a sentence's end ("must be a multiple of 2"); None: nothing."""
        return f"must be a multiple of {self.ranks_multiple}" if p % self.ranks_multiple else None

    def micro_batches_problem(self, p: int, m: int) -> str | None:
        """Say what is wrong with m micro-batches on p ranks, as a sentence's end ("must be at least 4"); or None."""
        multiple, fewest = self.micro_batches_multiple(p), self.fewest_micro_batches(p)
        if m % multiple == 0 and m >= fewest:
            return None
        least = f"at least {fewest}"
        return f"must be {least}" if multiple == 1 else f"must be a multiple of {multiple}, {least}"

    def stages_problem(self, v: int) -> str | None:
        """Say what is wrong with v stages per rank, a sentence ("it needs 2 or more stages per rank"); or None."""
        n = self.stages_per_rank
        if self.least_stages is None:
            return None if v == n else f"it has {counted(n, 'stage')} per rank"
        return None if v >= n else f"it needs {n} or more stages per rank"

    def micro_batches_from(self, p: int, m: int) -> int:
        """The smallest number of micro-batches from m on that p ranks can run."""
        multiple = self.micro_batches_multiple(p)
        return -(-max(m, self.fewest_micro_batches(p)) // multiple) * multiple

    def fewest(self, p: int, v: int) -> Schedule:
        """The lists for as few micro-batches as p ranks take: they show where stages are."""
        return self.build(p, self.micro_batches_from(p, 1), v)

    @cached_property
    def example(self) -> Schedule:
        """Lists of a few ranks that show all that the schedule does."""
        p = 4 * self.ranks_multiple
        return self.build(p, self.micro_batches_from(p, 2 * p))

    @cached_property
    def stages_per_rank(self) -> int:
        """Stages that each rank has: the schedule's fixed number, or the least where a scenario may choose more."""
        return self.least_stages or len(self.example.rank_of_stage) // len(self.example.ranks)

    @cached_property
    def exchanges_jointly(self) -> bool:
        """Blocking messages of a forward and of the backward after it go at once, both ways."""
        return bool(self.example.joint)

    @cached_property
    def model_copies(self) -> int:
        """Ranks that hold the same part of the model: 2 for DualPipe."""
        parts_held = self.example.part_of_stage
        return len(parts_held) // len(set(parts_held))

    def model_stages(self, p: int, v: int) -> int:
        """Parts that the model's layers are dealt out to."""
        return max(1, p * v // self.model_copies)

    @cached_property
    def backward(self) -> Backward:
        """Return how backwards run: whole (B), split (I and W), or both ways (mixed)."""
        kinds = {a.kind for entries in self.example.ranks for entry in entries for a in parts(entry)}
        if Kind.B not in kinds:
            return "split"
        return "mixed" if Kind.I in kinds else "whole"

    @cached_property
    def pairs(self) -> bool:
        """Ranks run a forward and a backward at once."""
        return any(isinstance(entry, Overlap) for entries in self.example.ranks for entry in entries)

    @cached_property
    def one_at_a_time(self) -> bool:
        """A micro-batch starts when the one before has come back: the stages of its chain take turns."""
        if len(self.example.chains) > 1:
            return False
        first = self.example.chains[0][0]
        entries = self.example.ranks[self.example.rank_of_stage[first]]
        kinds = [a.kind for e in entries for a in parts(e) if a.stage == first and a.kind is not Kind.W]
        return all(kind is not Kind.F for kind in kinds[1::2])

    @cached_property
    def ends_on_last_rank(self) -> bool:
        """The last rank alone computes losses."""
        last = len(self.example.ranks) - 1
        return all(self.example.rank_of_stage[chain[-1]] == last for chain in self.example.chains)

    @cached_property
    def _warm_up_grows(self) -> bool:
        """More micro-batches make ranks begin with more forwards."""
        p, m = len(self.example.ranks), self.example.micro_batches
        longer = self.build(p, self.micro_batches_from(p, m + 1))
        return count_first_forwards(longer) != count_first_forwards(self.example)

    @cache  # noqa: B019  (forms live as long as the program)
    def forwards_first(self, p: int, m: int, v: int) -> tuple[int, ...]:
        """Return by stage the forwards that its rank runs before its first backward; 1 if seconds decide."""
        if self.follows_times:
            return (1,) * (p * v)
        steady = self.micro_batches_from(p, 2 * p)
        any_number = self.in_groups_of is not None and self.micro_batches_multiple(p) == 1  # a group may be larger
        if not any_number and steady < m and not self._warm_up_grows:
            return self.forwards_first(p, steady, v)
        return count_first_forwards(self.build(p, m, v))


def count_first_forwards(schedule: Schedule) -> tuple[int, ...]:
    """Return by stage the forwards that its rank runs before the first entry with a backward."""
    counts = [0] * len(schedule.rank_of_stage)
    for entries in schedule.ranks:
        for entry in entries:
            if isinstance(entry, Overlap) or entry.kind is not Kind.F:
                break
            counts[entry.stage] += 1
    return tuple(counts)
