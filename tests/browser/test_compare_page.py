"""The comparison page in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import synthetic

from sim.inputs.measured_run import load_measured
from sim.studies.compared import Pair
from sim.studies.comparison import compare, simulate_run
from sim.studies.measured import own_profile, to_timeline
from sim.studies.regression import scenario_of
from sim.views.compare_page import compare_page

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
MODEL = "Bokeh.documents[0].get_model_by_name"


def compared() -> str:
    """The page of a pipeline of four, simulated, and 6 % slower measured."""
    simulated, measured = (synthetic.one_f_one_b(p=4, m=8, copies=1, scale=scale) for scale in (1.0, 1.06))
    pair = Pair.of(simulated.step_time_s, measured.step_time_s)
    result = synthetic.comparison_of(pair, actions={"F": 8, "B": 8}, ranks=4, name="pp4", others_cores=0.1)
    return compare_page(result, simulated, measured)


def test_simulated_rows_stand_above_measured_ones(open_page: Any) -> None:
    page = open_page(compared())
    tracks = list(dict.fromkeys(row[0] for row in page.evaluate("stepsim.data.rows")))
    assert tracks[:4] == ["rank 0 simulated", "rank 0 measured", "rank 1 simulated", "rank 1 measured"]
    drawn = page.evaluate(f"{MODEL}('exact:F').data_source.data.start.length")
    assert drawn == 2 * 4 * 8
    assert page.evaluate(f"{MODEL}('timeline').x_range.end") == pytest.approx(
        synthetic.one_f_one_b(p=4, m=8, copies=1, scale=1.06).step_time_s
    )
    assert page.locator("#actions tbody tr").count() == 2
    assert page.locator("#memory-table tbody tr").count() == 4


@pytest.mark.parametrize(
    ("name", "tracks"),
    [
        ("1f1b_pp2", ["rank 0 simulated", "rank 0 measured", "rank 1 simulated", "rank 1 measured"]),
        ("dp2_bucketed", ["ranks 0, 1 simulated", "rank 0 measured", "rank 1 measured"]),  # equal ranks: simulated once
        ("tp2", None),
        ("cp2_ring", None),
        ("zb_v_pp2", None),
    ],
)
def test_stored_runs_are_drawn_above_each_other(open_page: Any, name: str, tracks: list[str] | None) -> None:
    path = ROOT / "scenarios" / "measured" / f"{name}.json"
    run, scenario = load_measured(path), scenario_of(path)
    simulation = simulate_run(scenario, run, own_profile(run, str(path)), str(path))
    measured = to_timeline(run.actions, scenario.parallelism)
    page = open_page(compare_page(compare(simulation, run, measured, 0.1), simulation.timeline, measured))
    rows = page.evaluate("stepsim.data.rows")
    if tracks:
        assert list(dict.fromkeys(row[0] for row in rows)) == tracks
    page.locator("#empty-rows").check()
    page.wait_for_function("stepsim.hiddenRows.size === 0")
    page.wait_for_timeout(100)
    filled = page.evaluate(f"""Object.keys(stepsim.data.kinds).flatMap((k) =>
        [...{MODEL}('exact:' + k).data_source.data.row])""")
    assert set(filled) == set(range(len(rows)))  # no row is empty
    assert len(filled) == len(simulation.timeline) + len(measured)
    assert page.locator("#actions tbody tr").count() >= 3
    for table in ("#ranks", "#memory-table"):
        assert page.locator(f"{table} tbody tr").count() == len(measured.classes)
    far = page.evaluate(f"{MODEL}('timeline').x_range.end")
    assert far == pytest.approx(max(simulation.step_time_s, measured.step_time_s))
