"""Stored steps of captured programs on two CPU cores: the stored calibration predicts them as well as it did."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the tool that predicts them imports torch")

ROOT = Path(__file__).parents[3]
MODEL_LIMIT, TWO_RANKS_LIMIT = 0.10, 0.12
PEAK_LIMIT = 0.03


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    tool = runpy.run_path(str(ROOT / "tools" / "measure_programs.py"), run_name="loaded")
    return {row["name"]: row for key in ("FOLDER", "TWO_RANKS") for row in tool["compared"](tool[key])}


def test_steps_are_predicted_within_their_limits(rows: dict[str, dict[str, Any]]) -> None:
    assert len(rows) == 12
    beyond = {
        name: row["error"]
        for name, row in rows.items()
        if abs(row["error"]) > (TWO_RANKS_LIMIT if row["script"] else MODEL_LIMIT)
    }
    assert not beyond


def test_peaks_are_predicted(rows: dict[str, dict[str, Any]]) -> None:
    errors = [abs(row["peak_error"]) for row in rows.values() if not row["script"]]
    assert errors
    assert max(errors) < PEAK_LIMIT


def test_collectives_are_those_that_ran(rows: dict[str, dict[str, Any]]) -> None:
    scripts = [row for row in rows.values() if row["script"]]
    assert scripts
    assert all(row["collectives_equal"] and row["collectives"] for row in scripts)


def test_other_processes_used_no_core(rows: dict[str, dict[str, Any]]) -> None:
    assert all(row["others_cores"] < 0.25 for row in rows.values())
    for folder in ("programs", "programs_two_ranks"):
        machine = json.loads((ROOT / "scenarios" / "measured" / folder / "machine.json").read_text())
        assert machine["settings"]["busy_cores_meanwhile"] < 0.25
