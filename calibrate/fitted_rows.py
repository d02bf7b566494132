"""The steps of a table that `calibrate.fit` fits, those that it predicts, and why other rows are left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario, parse_scenario
from sim.prices.profile import Profile
from sim.validation.records import Measurement, Table

NAMED = 3  # of the rows that are left out for one reason


@dataclass(frozen=True, slots=True)
class Case:
    """A measured training step that a fit uses."""

    row: Measurement
    scenario: Scenario

    def log_error(self, profile: Profile) -> float:
        """Simulate the step and return log(predicted ÷ measured step time)."""
        from sim.simulation import simulate

        step = simulate(self.scenario, profile, engine="static")
        return math.log(step.step_time_s / self.row.measured["step_time_s"])


@dataclass(frozen=True, slots=True)
class FittedRows:
    """A table's steps: those to fit, those to predict with the fit, and a line for each reason to leave rows out."""

    cases: Sequence[Case]
    rest: Sequence[Case] = ()
    left_out: Sequence[str] = ()


def rows_to_fit(table: Table, base: Profile, given: int | None = None) -> FittedRows:
    """Choose from the table's steps on the profile's GPU (of all steps, if none is on it).

    `given`: so many evenly spread steps are fitted, the others predicted. Otherwise of each group the first and the
    last step are fitted, as a group's steps are much alike.

    Raises:
        InputError: if a row cannot be read, or if there are fewer than two steps, or than `given`.
    """
    for row in table.rows:
        if row.unreadable:
            raise InputError(row.unreadable)
    timed = [row for row in table.rows if row.kind == "training_step" and "step_time_s" in row.measured]
    if not timed:
        raise InputError(f"{table.path}: no row has measured.step_time_s; only training steps can be fitted")
    cases = [Case(row, _scenario(row, table)) for row in timed]
    mine = [case for case in cases if case.scenario.calibration == base.reference] or cases
    chosen = _ends_of_groups(mine) if given is None else mine
    here, fitted = [case.row for case in mine], [case.row for case in chosen]
    reasons = (
        ("without measured.step_time_s", _without(table.rows, timed)),
        (f"on another GPU than {base.reference}", _without(timed, here)),
        (
            "between the first and the last of a group",
            _without(here, fitted),
        ),
    )
    left = [_line(why, rows) for why, rows in reasons if rows]
    if len(chosen) < 2:
        allowed = "2 or more (`stepsim run --measured` takes one measured step)"
        raise InputError(f"{table.path}: found 1 step to fit; allowed: {allowed}")
    if given is None:
        return FittedRows(chosen, (), left)
    if len(mine) < given:
        raise InputError(f"{table.path}: --given: found {given}; the table has {len(mine)} steps that can be fitted")
    places = {round(i * (len(mine) - 1) / max(1, given - 1)) for i in range(given)}
    rest = [case for i, case in enumerate(mine) if i not in places]
    return FittedRows([mine[i] for i in sorted(places)], rest, left)


def _scenario(row: Measurement, table: Table) -> Scenario:
    return parse_scenario({**row.scenario, "name": row.id}, f"{table.path}: {row.id}", row.folder)


def _ends_of_groups(cases: Sequence[Case]) -> list[Case]:
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.row.group, []).append(case)
    return [case for group in groups.values() for case in ([group[0], group[-1]] if len(group) > 1 else group)]


def _without(rows: Sequence[Measurement], others: Sequence[Measurement]) -> list[Measurement]:
    ids = {id(row) for row in others}
    return [row for row in rows if id(row) not in ids]


def _line(why: str, rows: Sequence[Measurement]) -> str:
    """`2 without a time (a, b)`."""
    names = ", ".join(row.id for row in rows[:NAMED]) + (", …" if len(rows) > NAMED else "")
    return f"{len(rows)} {why} ({names})"
