"""The search's page in a real browser: drawn offline, hovered, hidden by schedule, sorted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from sim.search.found import ClusterSearch, several_searches
from sim.search.runnable import Runnable
from sim.views.clusters_page import clusters_page
from sim.views.search_page import search_page
from tests.sim.search.test_search_page import result, row

pytestmark = pytest.mark.browser


def test_drawn_and_sorted(open_page: Callable[[str], Any]) -> None:
    rows = [row(0.5, 3 * 2.0**33), row(0.9, 2.0**32, schedule="zb_v", virtual_stages=2)]
    page = open_page(search_page(result(rows)))
    table = page.locator('table[data-table="best"]')
    assert table.locator("tbody tr").count() == 2
    assert "500.0 ms" in table.locator("tbody tr").first.inner_text()
    table.get_by_role("button", name="Memory").click()
    assert "900.0 ms" in table.locator("tbody tr").first.inner_text()
    assert table.locator("th[aria-sort=ascending]").inner_text() == "Memory"
    count = "Bokeh.documents[0].get_model_by_name('schedule:zb_v').data_source.data.x.length"
    assert page.evaluate(count) == 1


def test_the_pareto_line_hides_no_dots(open_page: Callable[[str], Any]) -> None:
    rows = [row(0.5, 3 * 2.0**33), row(0.9, 2.0**32)]
    page = open_page(search_page(result(rows)))
    level = "Bokeh.documents[0].get_model_by_name('%s').level"
    assert page.evaluate(level % "pareto") == "underlay"
    assert page.evaluate(level % "schedule:1f1b") == "glyph"


def test_a_row_goes_away_as_yaml_and_command(open_page: Callable[[str], Any]) -> None:
    page = open_page(search_page(result([row(0.5, 2.0**33), row(0.9, 2.0**32)])))
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    table = page.locator('table[data-table="best"]')
    assert "40.0 %\t10.0 %\t10.0 %" in table.locator("tbody tr").first.inner_text()
    for name, text in (("YAML", "model: llama3-8b\n"), ("Command", "stepsim run x")):
        table.get_by_role("button", name=name).first.click()
        assert page.evaluate("navigator.clipboard.readText()") == text
    page.locator(".copy-csv").first.click()
    head, first, _ = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert head == "Layout,Step,Tokens/s/GPU,MFU,Exposed,Bubble,Memory,Schedule,Micro-batch,Recompute"
    assert first.startswith('"tp 2 with sp, pp 2, dp 2, ZeRO-1",0.500000000000,')


@pytest.mark.parametrize("width", [1400, 1000])
def test_the_buttons_of_wide_rows_are_in_sight(open_page: Callable[[str], Any], width: int) -> None:
    wide = {"schedule": "interleaved_1f1b", "virtual_stages": 6, "recompute": "selective", "tp_overlap": "wgrad"}
    page = open_page(search_page(result([row(0.5, 3 * 2.0**33, Runnable("x", "y", "z"), **wide)])))
    page.set_viewport_size({"width": width, "height": 900})
    box = page.locator('table[data-table="best"] tbody').get_by_role("button", name="Flags").bounding_box()
    assert box["x"] + box["width"] <= width
    if width == 1400:
        assert page.evaluate("[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)")


def test_layouts_of_clusters_have_room(open_page: Callable[[str], Any]) -> None:
    """A layout takes three lines at most, and a cluster's name one: they had ten, beside an empty column."""
    wide = {"schedule": "interleaved_1f1b", "virtual_stages": 20, "tp_overlap": "wgrad", "sp": True, "cp": 4}
    best = replace(row(0.5, 3 * 2.0**33, Runnable("x", "y", "z"), **wide), cost_per_trillion_tokens=5e5)
    found = ClusterSearch("mi300x-node", result([best], price=2.5))
    page = open_page(clusters_page(several_searches((1024,), (found,))))
    page.set_viewport_size({"width": 1440, "height": 900})
    of_text = "const r = document.createRange(); r.selectNodeContents(e);"
    lines = f"e => {{ {of_text} return new Set([...r.getClientRects()].map(b => b.top)).size }}"
    cells = page.locator('table[data-table="clusters"] tbody tr').first.locator("td")
    assert cells.nth(0).evaluate(lines) == 1
    assert cells.nth(1).evaluate(lines) <= 3
