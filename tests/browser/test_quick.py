"""A real browser once: the page that a command writes, and the explorer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.core.units import seconds
from sim.inputs.scenario import load_scenario
from sim.simulation import simulate
from tests.browser.test_explore import MODEL, ROOT, SCENARIO, SMALLER, page, server, visit
from tests.modules import run_module

pytestmark = pytest.mark.browser
__all__ = ["page", "server"]  # fixtures


def test_page_of_the_command(open_page: Any, tmp_path: Path) -> None:
    made = tmp_path / "run.html"
    ran = run_module("sim.run", "scenarios/1f1b_pp8.yaml", "--html", made)
    assert ran.returncode == 0, ran.stderr
    page = open_page(made.read_text("utf-8"))
    tracks = {row[0] for row in page.evaluate("stepsim.data.rows")}
    assert len(tracks) == 8
    assert page.locator("#ranks .rankbar").count() == 8
    assert page.evaluate(f"{MODEL}('exact:F').data_source.data.start.length") > 0
    assert page.evaluate(f"{MODEL}('memory:total').data_source.data.time.length") > 2


def test_a_choice_redraws_its_panel_and_its_link_restores_it(page: Any, server: str, tmp_path: Path) -> None:
    visit(page, server)
    assert "equally fast" in page.evaluate(f"{MODEL}('verdict').text")
    page.get_by_label("Schedule").nth(1).select_option("zb_v")
    page.wait_for_function(f"{MODEL}('verdict').text.includes('<b>B</b>: ')")
    page.wait_for_function("location.search.includes('b.parallelism.schedule=zb_v')")
    expected = simulate(load_scenario(ROOT / SCENARIO, [*SMALLER, "parallelism.schedule=zb_v"])).step_time_s
    assert f"B {seconds(expected)}" in page.evaluate(f"{MODEL}('verdict').text")
    visit(page, page.url)
    assert page.evaluate(f"{MODEL}('b.parallelism.schedule').value") == "zb_v"
    assert page.evaluate(f"{MODEL}('a.parallelism.schedule').value") == "1f1b"
    page.screenshot(path=tmp_path / "explore.png", full_page=True)
    assert (tmp_path / "explore.png").stat().st_size > 80_000
