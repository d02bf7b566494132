"""The lecture decks, row by row: every scenario, test and command is there, and commands show what the decks say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs import courses as page  # noqa: E402
from sim.commands import course_rows as courses  # noqa: E402
from tests.printed_numbers import Watched, shows  # noqa: E402

ROWS = list(courses.rows())
MOST_WITHOUT = 25


def test_there_are_135_in_order_and_most_have_figures() -> None:
    assert [row.row for row in ROWS] == list(range(1, 136))
    assert {row.status for row in ROWS} <= {"full", "partial"}
    assert all(row.note for row in ROWS if row.status == "partial"), "a partial row says what is missing"
    assert sum(not row.figures for row in ROWS) <= MOST_WITHOUT


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.row)
def test_scenario_and_test_are_there(row: courses.CourseRow) -> None:
    assert (ROOT / "scenarios" / f"{row.scenario}.yaml").is_file()
    file, _, name = row.test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE)


def test_the_page_has_every_row_as_the_data_has_it() -> None:
    lines = page.PAGE.read_text("utf-8").splitlines()
    for row in ROWS:
        mine = next(line for line in lines if line.startswith(f"| {row.row} | "))
        said = (row.statement, row.command, row.scenario, row.status, *(figure.name for figure in row.figures))
        assert all(text.replace("|", "\\|") in mine for text in said), "python -m docs.courses"
        assert row.note == "" or f"- **{row.row}**\\*: {row.note}" in lines, "python -m docs.courses"


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.figures or row.command.startswith("stepsim")], ids=lambda row: row.row
)
def test_every_command_shows_its_figures(row: courses.CourseRow) -> None:
    """What the command prints has every number that a figure is made of."""
    ran = courses.result_of(row.command)
    for figure in row.figures:
        assert figure.verdict(courses.value(figure.how, ran.found)) == "", figure.name
        watched = Watched()
        courses.value(figure.how, watched.wrap(ran.found))
        assert [number for number in watched.read if not shows(ran.printed, number)] == [], figure.name
