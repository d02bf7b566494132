"""The map's page shows the measured runs as they are simulated today; its searched cells would take minutes."""

from __future__ import annotations

from pathlib import Path

from docs.map_tables import run_table
from sim.commands.map import MEASURED
from sim.inputs.shipped import scenarios_folder
from sim.validation.best_measured import best_measured

PAGE = Path(__file__).parents[2] / "docs" / "map.md"


def test_the_table_of_measured_runs() -> None:
    """Where this fails: `python -m docs.map_tables` prints both tables."""
    assert run_table(best_measured(scenarios_folder() / MEASURED).rows) in PAGE.read_text(encoding="utf-8")
