"""The courses, row by row: every scenario, test and command is there, commands run, numbers are those of the page."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs import courses  # noqa: E402
from tests.modules import run_module  # noqa: E402

ROWS = list(courses.rows())
COMMANDS = sorted(set().union(*map(courses.commands, ROWS)))
NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def committed() -> list[str]:
    return courses.PAGE.read_text("utf-8").splitlines()


@cache
def found(command: str) -> Any:
    return courses.run(command, lambda words, folder: run_module(*words, cwd=Path(folder), timeout=courses.SECONDS))


def test_there_are_135_in_order() -> None:
    assert [row.n for row in ROWS] == list(range(1, 136))
    assert {row.status for row in ROWS} <= {"full", "partial"}
    assert all(row.note for row in ROWS if row.status == "partial"), "a partial row says what is missing"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.n)
def test_scenario_and_test_are_there(row: courses.CourseRow) -> None:
    assert (ROOT / "scenarios" / f"{row.scenario}.yaml").is_file()
    file, _, name = row.test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE)


def test_the_page_has_every_row_as_the_data_has_it() -> None:
    lines = committed()
    for row in ROWS:
        mine = next(line for line in lines if line.startswith(f"| {row.n} | "))
        assert all(text.replace("|", "\\|") in mine for text in (row.item, row.run, row.scenario, row.status)), mine
        assert row.note == "" or f"- **{row.n}**\\*: {row.note}" in lines, "python -m docs.courses"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(command: str) -> None:
    found(command)


@pytest.mark.parametrize("row", [row for row in ROWS if row.figures], ids=lambda row: row.n)
def test_numbers_are_those_of_the_page(row: courses.CourseRow) -> None:
    old = next(line for line in committed() if line.startswith(f"| {row.n} | "))
    new = courses.line(row, {command: found(command) for command in courses.commands(row)})
    assert NUMBER.sub("#", old) == NUMBER.sub("#", new), "python -m docs.courses"
    numbers = [[float(x.replace(",", "")) for x in NUMBER.findall(line)] for line in (old, new)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.03), "costs have changed: python -m docs.courses"
