"""Seconds of a step by operator and phase, and by part of the model, for each class of equal ranks.

Sums over the programs that a rank runs, each as often as it runs. Operators have the names of the model's description
(`attention_softmax`, `mlp_up`, …), collectives `GROUP KIND` (`tp all_reduce`), and `host` is what the device waits for
the host. Collectives count whether or not computation hides them, so shares need not add up to one; messages between
pipeline stages belong to no program and are left out. A measured block is one operator (`layer`).
Parts of the model sum up the same seconds; an operator's part is written down where the model's description makes it
(`sim.core.program.Part`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.programs import priced_items
from sim.results.metrics import text_of
from sim.results.records import Record

if TYPE_CHECKING:
    from sim.core.timeline import Detail
    from sim.results.step import FinishedStep


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
    """By class of ranks; classes that run the same for equally long are one, however faults tell them apart."""
    step_s = sim.step_time_s
    alike: dict[tuple[OperatorTime, ...], list[int]] = {}
    for c, programs in zip(sim.plan.classes, sim.built.programs, strict=True):
        total: dict[tuple[str, str], float] = {}
        for program, count in programs.items():
            for key, seconds in program.operators.items():
                total[key] = total.get(key, 0.0) + seconds * count
        rows = sorted(total.items(), key=lambda row: -row[1])
        alike.setdefault(tuple(_row(*key, seconds, step_s) for key, seconds in rows), []).extend(c.ranks)
    return tuple(RankOperators(text_of(sorted(ranks)), min(ranks), rows) for rows, ranks in alike.items())


def time_by_part(sim: FinishedStep) -> tuple[RankParts, ...]:
    """By class of ranks, as `time_by_operator`."""
    step_s = sim.step_time_s
    alike: dict[tuple[PartTime, ...], list[int]] = {}
    for c, programs in zip(sim.plan.classes, sim.built.programs, strict=True):
        total: dict[tuple[str, str], float] = {}
        for program, count in programs.items():
            for (part, group), seconds in program.by_part.items():
                total[part.value, group] = total.get((part.value, group), 0.0) + seconds * count
        rows = sorted(total.items(), key=lambda row: -row[1])
        times = tuple(PartTime(*key, seconds, seconds / step_s if step_s > 0 else 0.0) for key, seconds in rows)
        alike.setdefault(times, []).extend(c.ranks)
    return tuple(RankParts(text_of(sorted(ranks)), min(ranks), rows) for rows, ranks in alike.items())


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
                runs[task.seconds] = [_row(*key, seconds, task.seconds) for key, seconds in rows]
    return [[x for x in found.get((d.name, d.source), {}).items() if len(x[1]) > 1] for d in details]


def _row(operator: str, phase: str, seconds: float, step_s: float) -> OperatorTime:
    return OperatorTime(operator, phase, seconds, seconds / step_s if step_s > 0 else 0.0)


def as_json(rows: Sequence[RankOperators] | Sequence[RankParts]) -> list[dict[str, object]]:
    """Plain data, a list entry for each class."""
    return [row.to_json() for row in rows]
