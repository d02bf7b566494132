"""Peak memory beside what NVIDIA's MLPerf submissions log (`max_memory_usage`), which no constant was chosen by.

The logs state neither unit nor rank. Taken are GiB of the first rank, whose stage keeps most micro-batches.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim.inputs.scenario import parse_scenario
from sim.simulation import simulate
from sim.validation.tables import read_table

PUBLISHED = Path(__file__).parents[3] / "scenarios" / "published"
GIB = 2**30


def logged_gib(table: str) -> dict[str, float]:
    """The largest memory of each row that has one, by its id."""
    rows: list[dict[str, Any]] = json.loads((PUBLISHED / f"{table}.json").read_text(encoding="utf-8"))["rows"]
    found = {row["id"]: row["run"].get("max_memory_usage_as_logged") for row in rows}
    return {row: gib for row, gib in found.items() if gib is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "words", "layouts", "within"),
    [
        ("mlperf_training_lora", "lora", 3, 0.035),  # frozen weights in 8 bits alone, kept inputs, graphs of layers
        ("mlperf_training_405b", "eos-dfw", 3, 0.035),  # H100: parameters in 8 bits
        ("mlperf_training_405b", "8xH200", 2, 0.035),
        ("mlperf_training_405b", "carina", 3, 0.12),  # GB200: one graph of the whole step
    ],
)
def test_peaks_are_those_of_the_logs(table: str, words: str, layouts: int, within: float) -> None:
    logged = {row: gib for row, gib in logged_gib(table).items() if words in row}
    by_peak = {round(gib): row for row, gib in logged.items()}  # one row for each layout
    rows = {row.id: row for row in read_table(PUBLISHED / f"{table}.json").rows}
    assert len(by_peak) >= layouts
    for row in by_peak.values():
        scenario = parse_scenario({**rows[row].scenario, "name": row}, row)
        first = simulate(scenario, engine="static").result["memory"][0]
        assert first["peak"] / GIB == pytest.approx(logged[row], rel=within), row
