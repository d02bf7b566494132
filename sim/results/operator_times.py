"""Seconds of a step by operator and phase, and by part of the model, for each class of equal ranks.

Sums over the programs that a rank runs, each as often as it runs. Operators have the names of the model's description
(`attention_softmax`, `mlp_up`, …), collectives `GROUP KIND` (`tp all_reduce`), and `host` is what the device waits for
the host. Collectives count whether or not computation hides them, so shares need not add up to one; messages between
pipeline stages belong to no program and are left out. A measured block is one operator (`layer`).
Parts of the model sum up the same seconds; an operator's part is written down where the model's description makes it
(`sim.core.program.ModelPart`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from sim.core.program import ModelPart
from sim.core.units import rank_numbers
from sim.programs import priced_items
from sim.programs.priced_items import add_all
from sim.results.records import Record

if TYPE_CHECKING:
    from sim.core.timeline import Detail, RankClass
    from sim.programs.compile import CompiledProgram
    from sim.results.step import FinishedStep

K = TypeVar("K", bound=tuple[str, str])
R = TypeVar("R")


class OperatorTime(Record, frozen=True):
    """An operator's seconds in one phase of a step, and their share of the step's time."""

    operator: str
    phase: str
    seconds: float
    share: float


class RankOperators(Record, frozen=True):
    """The operators of a class of equal ranks, longest first."""

    ranks: str
    rank: int  # the lowest
    operators: tuple[OperatorTime, ...]


class PartTime(Record, frozen=True):
    """Seconds of a part of the model in a step, all phases together, and their share of the step's time."""

    part: str
    group: str  # of communication: whose; else ""
    seconds: float
    share: float


class RankParts(Record, frozen=True):
    """The parts of a class of equal ranks, longest first."""

    ranks: str
    rank: int  # the lowest
    parts: tuple[PartTime, ...]


Runs = list[tuple[float, list[OperatorTime]]]  # seconds of a run, and its operators


def time_by_operator(sim: FinishedStep) -> tuple[RankOperators, ...]:
    """Return the time by operator of each class of ranks; classes with equal programs and times are one."""
    return tuple([RankOperators(*found) for found in _by_class(sim, lambda program: program.operators, OperatorTime)])


def time_by_part(sim: FinishedStep) -> tuple[RankParts, ...]:
    """Return the time by part of the model of each class of ranks; classes with equal programs and times are one."""
    return tuple([RankParts(*found) for found in _by_class(sim, lambda program: program.by_part, PartTime)])


def host_wait_s(rows: Sequence[RankParts]) -> float:
    """Return for how long the ranks that wait longest for their host do so."""
    return max((part.seconds for row in rows for part in row.parts if part.part == ModelPart.HOST), default=0.0)


def _by_class(
    sim: FinishedStep, seconds_of: Callable[[CompiledProgram], dict[K, float]], row: Callable[..., R]
) -> list[tuple[str, int, tuple[R, ...]]]:
    """For classes with equal rows their ranks in words, the lowest, and the rows, longest first.

    `row` makes a row of a key's two parts, its seconds in the step and their share of it. Rows that differ by what sums
    in another order round are equal.
    """
    step_s = sim.step_time_s
    same: dict[tuple[tuple[CompiledProgram, int], ...], list[RankClass]] = {}  # classes that run the same programs
    for c, programs in zip(sim.plan.classes, sim.built.programs, strict=True):
        same.setdefault(tuple(programs.items()), []).append(c)
    alike: dict[frozenset[tuple[K, str]], tuple[tuple[R, ...], list[RankClass]]] = {}
    for runs, classes in same.items():
        total: dict[K, float] = {}
        for program, count in runs:
            add_all(total, seconds_of(program), count)
        longest = sorted(total.items(), key=lambda pair: -pair[1])
        rows = [row(*key, seconds, _share(seconds, step_s)) for key, seconds in longest]
        rounded = frozenset([(key, f"{seconds:.9e}") for key, seconds in longest])
        alike.setdefault(rounded, (tuple(rows), []))[1].extend(classes)
    return [(_named(classes), min(c.rank for c in classes), rows) for rows, classes in alike.values()]


def _named(classes: Sequence[RankClass]) -> str:
    first, last = min(c.ranks[0] for c in classes), max(c.ranks[-1] for c in classes)
    if sum(len(c.ranks) for c in classes) == last - first + 1:  # classes have no rank in common, so none is missing
        return rank_numbers(range(first, last + 1))
    return rank_numbers(sorted(chain.from_iterable([c.ranks for c in classes])))


def runs_of_details(sim: FinishedStep, details: Sequence[Detail]) -> list[Runs]:
    """For each of a timeline's details its runs of more than one operator: seconds of a run, and its operators,
    longest first, with their share of it. Runs of one name may differ, as stages of more and fewer layers do."""
    found: dict[tuple[str, str], dict[float, list[OperatorTime]]] = {}
    for programs in sim.built.programs:
        for program in programs:
            for task, spent in zip(program.tasks, program.spent, strict=True):
                runs = found.setdefault((task.detail.name, task.detail.source), {})
                if task.group or task.seconds in runs:
                    continue
                own = dict(spent.priced.by(priced_items.operator))
                if spent.late_s > 0:
                    own["host", spent.priced.phase] = spent.late_s
                rows = sorted(own.items(), key=lambda row: -row[1])
                runs[task.seconds] = [OperatorTime(*key, s, _share(s, task.seconds)) for key, s in rows]
    return [[x for x in found.get((d.name, d.source), {}).items() if len(x[1]) > 1] for d in details]


def _share(seconds: float, whole_s: float) -> float:
    return seconds / whole_s if whole_s > 0 else 0.0
