"""The page of a step of reinforcement learning in a browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sim.inputs.scenario import parse_scenario
from sim.rl.simulation import simulate_rl
from sim.views.rl_page import rl_page
from tests.browser.test_timeline_page import frame

pytestmark = pytest.mark.browser
STEP: dict[str, Any] = {
    "model": "llama3.2-1b",
    "cluster": "dgx-h100",
    "training": {"seq_len": 1024, "global_batch_size": 32},
    "parallelism": {"dp": 2},
    "rl": {
        "prompts_per_step": 8,
        "generations_per_prompt": 4,
        "prompt_len": 64,
        "output_len": {"mean": 200, "sigma": 0.7},
        "colocated": False,
        "steps_off": 1,
    },
}


def test_phases_stand_in_rows_of_their_pool(open_page: Callable[[str], Any]) -> None:
    simulation = simulate_rl(parse_scenario(STEP))
    page = open_page(rl_page(simulation))
    rows = page.locator("#phases tbody tr")
    assert rows.count() == len(simulation.phases) == 6
    assert rows.nth(0).inner_text().startswith("generation")
    assert page.locator("#pools tbody tr").count() == 2
    assert page.locator(".timeline-plot canvas").count() > 0
    bands = page.evaluate("window.stepsim.data.bands.map(band => band[0])")
    assert bands == ["trainer, ranks 0, 1", "engine, ranks 2, 3"]


@pytest.mark.parametrize("width", [390, 480])
def test_bars_stand_under_the_time_axis_on_a_telephone(width: int, open_page: Callable[[str], Any]) -> None:
    """Long names of ranks take the same room beside the bars and beside the axis above them."""
    page = open_page(rl_page(simulate_rl(parse_scenario(STEP))))
    page.set_viewport_size({"width": width, "height": 844})
    page.reload()
    page.wait_for_function("document.documentElement.dataset.ready === 'true'")
    axis, bars = frame(page, "axis"), frame(page, "timeline")
    assert axis["x"] == pytest.approx(bars["x"], abs=1)
    assert axis["width"] == pytest.approx(bars["width"], abs=1)
    assert bars["width"] > width / 4
