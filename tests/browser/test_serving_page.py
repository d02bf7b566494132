"""The plots of a serving page in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sim.commands.run import main

SCENARIO = Path(__file__).parents[2] / "scenarios" / "serve_llama8b.yaml"
PLOTS = ("rate", "queue", "batch", "time_to_first_token", "time_per_output_token", "request_latency")


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("serving") / "page.html"
    slo = ["--slo", "ttft_p99=0.25", "--set", "inference.requests.count=60"]
    assert CliRunner().invoke(main, [str(SCENARIO), *slo, "--html", str(file)]).exit_code == 0
    return file.read_text("utf-8")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [480, 1440, 1920])
def test_every_plot_is_drawn_within_the_page(
    open_page: Callable[[str], Any], html: str, width: int, theme: str
) -> None:
    page = open_page(html)
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("theme => localStorage.setItem('stepsim-theme', theme)", theme)
    page.reload()
    page.wait_for_function("document.documentElement.dataset.ready === 'true'")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    drawn = page.evaluate("Bokeh.documents[0].roots().map(r => [r.name, r.inner_width, r.inner_height])")
    sizes = {name: (w, h) for name, w, h in drawn}
    assert all(sizes[name][0] > 200 and sizes[name][1] > 120 for name in PLOTS), sizes
    limit = page.evaluate("Bokeh.documents[0].get_model_by_name('limits:time_to_first_token_s').glyph.line_color.value")
    assert limit == {"light": "#b3261e", "dark": "#ff8a80"}[theme]
