"""Notebooks run, and their pages show what they give: `python -m docs.notebooks` writes both."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs.notebooks.running import NOTEBOOKS, as_page, executed, saved  # noqa: E402

nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
NUMBER = re.compile(r"\d[\d,]*\.?\d*(?: [mµn]s| s)?")


@cache
def run(path: Path) -> Any:
    return executed(path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_cell_runs_and_the_page_shows_what_it_gave(path: Path) -> None:
    page = as_page(run(path))
    hint = "python -m docs.notebooks"
    assert NUMBER.sub("#", path.with_suffix(".md").read_text("utf-8")) == NUMBER.sub("#", page), hint
    assert NUMBER.sub("#", path.read_text("utf-8")) == NUMBER.sub("#", saved(run(path))), hint


def test_a_step_shows_itself() -> None:
    shown = [
        o.data["text/html"]
        for c in run(NOTEBOOKS[0]).cells
        if c.cell_type == "code"
        for o in c.outputs
        if o.output_type == "execute_result" and "text/html" in o.data
    ]
    assert len(shown) == 2
    assert all("Step time" in html and "Where the step goes" in html for html in shown)


def test_a_cell_that_fails_fails_the_test(tmp_path: Path) -> None:
    from nbclient.exceptions import CellExecutionError

    bad = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("from sim import nothing_of_that_name")])
    nbformat.write(bad, tmp_path / "bad.ipynb")
    with pytest.raises(CellExecutionError, match="nothing_of_that_name"):
        executed(tmp_path / "bad.ipynb")
