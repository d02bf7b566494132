"""The tables of docs/graph.md are what the code prints."""

from __future__ import annotations

import doctest
from pathlib import Path


def test_the_worked_example_prints_its_tables() -> None:
    page = Path(__file__).parents[1] / "docs" / "graph.md"
    text = page.read_text(encoding="utf-8")
    text = text.replace("```pycon", "\n").replace("```", "\n")  # a fence would be taken for the last line's output
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    result = doctest.DocTestRunner().run(test)
    assert result.attempted > 10
    assert result.failed == 0
