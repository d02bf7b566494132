"""`sim.courses`: what the decks say, and what their commands show; tests/docs/test_courses.py runs every row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.commands import course_rows as courses
from sim.commands.courses import main
from sim.core.errors import InputError
from tests.processes import invoked

ROWS = list(courses.rows())
QUICK = (4, 43, 67, 79, 108)


@pytest.mark.parametrize("row", [row for row in ROWS if row.row in QUICK], ids=lambda row: row.row)
def test_a_command_shows_its_figures(row: courses.CourseRow) -> None:
    for figure, number in zip(row.figures, courses.shown(row), strict=True):
        assert figure.verdict(number) == "", figure.name


def test_a_row_is_printed_with_its_command_and_numbers(tmp_path: Path) -> None:
    file = tmp_path / "row.json"
    printed = invoked(main, "4", "--json", str(file)).stdout
    (found,) = json.loads(file.read_text())["rows"]
    assert (found["row"], found["deck"], found["command"]) == (4, 3, "stepsim run attention_unfused_gpt2")
    (figure,) = found["figures"]
    assert figure["shown"] == pytest.approx(figure["said"], rel=figure["tolerance"])
    assert all(text in printed for text in (found["statement"], found["command"], figure["name"]))


def test_all_rows_are_listed() -> None:
    _head, _rule, *lines = invoked(main).stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == [row.row for row in ROWS]


def test_a_row_that_is_not_there() -> None:
    assert "ROW: found 999; allowed: 1 to 135" in invoked(main, "999", code=2).output


def test_a_command_that_cannot_run_here_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: str) -> None:
        raise InputError("needs torch")

    monkeypatch.setattr(courses, "result_of", refused)
    row = next(row for row in ROWS if row.row == 29)
    assert courses.shown(row) == [None]


def test_an_expression_is_no_program() -> None:
    with pytest.raises(InputError, match="is no part of an expression"):
        courses.value("[x for x in rows]", {"rows": []})
