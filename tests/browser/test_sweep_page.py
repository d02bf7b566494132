"""The sweep's page in a real browser: it draws offline, and its table sorts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sim.commands.options import Study
from sim.commands.sweep import run_sweep
from sim.views.sweep_page import sweep_page

pytestmark = pytest.mark.browser
FILE = Path(__file__).parents[2] / "scenarios" / "1f1b_pp8.yaml"


def test_lines_and_rows(open_page: Callable[[str], Any]) -> None:
    ranks, scales = "faults.stragglers.0.rank=0..7", "faults.stragglers.0.compute_scale=1.1,2"
    result = run_sweep(FILE, [ranks, scales, "parallelism.tp=1,5"], Study())
    page = open_page(sweep_page(result))
    plot = "Bokeh.documents[0].get_model_by_name('sweep')"
    assert page.evaluate(f"{plot}.renderers.length") == 3 * 2  # a line, its dashed one and its dots, for each scale
    assert page.locator("tbody tr").count() == 32
    page.get_by_role("button", name="Step", exact=True).click()
    times = [
        float(x)
        for x in page.evaluate("[...document.querySelectorAll('tbody td.num:nth-child(4)')].map(c => c.dataset.value)")
    ]
    assert len(times) == 16
    assert times == sorted(times)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("tbody tr", has_text="1.1").first.get_by_role("button", name="YAML").click()
    assert "compute_scale: 1.1" in page.evaluate("navigator.clipboard.readText()")
