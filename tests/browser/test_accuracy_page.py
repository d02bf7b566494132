"""Validation's page in a real browser: the look of all pages, axes with numbers and units, tables that sort."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.modules import run_module

pytestmark = pytest.mark.browser
TABLE = Path(__file__).parents[2] / "scenarios" / "published" / "torchtitan_h100.json"


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("accuracy") / "page.html"
    ran = run_module("sim.validate", TABLE, "--html", made)
    assert ran.returncode == 0, ran.stderr
    return made.read_text("utf-8")


def test_axes_have_numbers_in_their_units(open_page: Callable[[str], Any], html: str) -> None:
    page = open_page(html)
    step, memory = (page.locator("svg").nth(i).locator("text").all_text_contents() for i in (0, 1))
    assert {"2.5 s", "3 s"} <= set(step)
    assert {"60 GiB", "80 GiB"} <= set(memory)
    assert "GiB" in page.locator("circle title").last.text_content()
    assert "e+" not in page.locator("main").inner_text()


@pytest.mark.parametrize("width", [480, 1440, 1920])
def test_it_looks_like_the_other_pages(open_page: Callable[[str], Any], html: str, width: int) -> None:
    page = open_page(html)
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".card").count() == 2
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 24, 30)"
    table = page.locator(".quantity table").nth(1)
    table.get_by_role("button", name="error").click()
    errors = [float(x.replace("−", "-").rstrip(" %")) for x in table.locator("tbody td:last-child").all_inner_texts()]
    assert errors == sorted(errors)
