"""Limits on running requests that a row's own figures disprove are not believed of its server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.commands.validate import validate_tables
from sim.inputs.scenario import parse_scenario
from sim.serve.simulation import simulate_serving
from sim.validation.running_requests import contradiction, running_requests
from sim.validation.tables import read_table
from tests.sim.validation.test_validate import table_file

SERVED = {
    "statistic": "mean",
    "scenario": {
        "model": "llama3-8b",
        "cluster": "dgx-h100",
        "inference": {"requests": {"prompt_len": 8, "output_len": 11, "count": 20}, "max_running_requests": 4},
    },
    "measured": {"time_per_output_token_s": 0.01},
}


@pytest.mark.parametrize(
    ("more", "disproved"),
    [
        ({"published": {"output_tokens_per_s": 495.0}}, 1),  # 495 · 10/11 · 0.01 = 4.5 running, 4 allowed
        ({"published": {"output_tokens_per_s": 430.0}}, 0),  # 3.9
        ({"published": {"output_tokens_per_s": 470.0}}, 0),  # 4.3, within the margin of rounded figures
        ({"published": {"output_tokens_per_s": 495.0}, "statistic": "median"}, 0),  # a median proves nothing
        ({"published": {"output_tokens_per_s": 495.0}, "measured": {"inter_token_latency_s": 0.04}}, 0),  # 4 at once
        ({}, 0),
    ],
)
def test_a_limit_that_a_rows_own_figures_disprove_is_not_believed_of_its_server(
    tmp_path: Path, more: dict[str, Any], disproved: int
) -> None:
    """By Little's law; rows of the same server with other requests lose the limit, too, and other servers' do not."""
    section = SERVED["scenario"]["inference"]
    others = {"requests": {**section["requests"], "rate_per_s": 1.0}}
    alike = {**SERVED, "scenario": {**SERVED["scenario"], "inference": {**section, **others}}}
    another = {**SERVED, "scenario": {**SERVED["scenario"], "parallelism": {"tp": 2}}}
    rows = [{"id": "b", **alike}, {"id": "a", **SERVED, **more}, {"id": "c", **another}]
    table = read_table(table_file(tmp_path, rows, "inference"))
    limits = [row.scenario["inference"].get("max_running_requests") for row in table.rows]
    assert limits == ([None, None, 4] if disproved else [4, 4, 4])
    assert read_table(table.path, 1).rows == table.rows[:1]  # a proof counts wherever it stands
    done = validate_tables([table], jobs=1)[0].as_dict()
    assert done["simulated"] == 3
    assert [x["id"] for x in done["not_believed"]] == ["b", "a"][: 2 * disproved]
    assert all("a needs 4 running requests" in x["reason"] for x in done["not_believed"])


def test_no_simulated_run_contradicts_itself(tmp_path: Path) -> None:
    """What the simulator says of a full batch needs as many as run, and no more."""
    given = {**SERVED["scenario"], "name": "full"}
    result = simulate_serving(parse_scenario(given)).result
    measured = {"time_per_output_token_s": result["time_per_output_token_s"]["mean"]}
    row = {"id": "a", **SERVED, "measured": {**measured, "output_tokens_per_s": result["output_tokens_per_s"]}}
    (found,) = read_table(table_file(tmp_path, [row], "inference")).rows
    needed = running_requests(found)
    assert 3.0 < (needed or 0.0) <= 4.0
    assert contradiction(found) == ""
    assert found.scenario["inference"]["max_running_requests"] == 4
