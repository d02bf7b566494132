"""The documentation's screenshots: every page that they show still draws, from the commands that the text names.

`STEPSIM_SCREENSHOTS=1 python -m pytest tests/browser/test_screenshots.py` writes them to docs/screenshots.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.test_explore import running_explorer, visit
from tests.modules import run_module
from tests.processes import HANGS_AFTER_S

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "screenshots"
MODEL = "Bokeh.documents[0].get_model_by_name"
MOST_BYTES = 200_000


def made(tmp_path: Path, *command: str) -> str:
    """The page that a command writes."""
    page = tmp_path / "made.html"
    done = run_module(*command, "--html", page)
    assert done.returncode == 0, done.stderr
    return page.read_text("utf-8")


def keep(name: str, page: Any, until: str | None = None) -> None:
    """A screenshot from the top to the end of the element `until`; kept, without loss, if asked for."""
    page.wait_for_timeout(500)
    box = page.locator(until).first.bounding_box() if until else None
    size = page.viewport_size
    height = box["y"] + box["height"] + 16 if box else page.evaluate("document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": size["width"], "height": height}
    shot = page.screenshot(full_page=True, clip=clip)
    assert len(shot) > 20_000  # of a page on which nothing is drawn it is smaller
    if os.environ.get("STEPSIM_SCREENSHOTS"):
        from PIL import Image

        out = io.BytesIO()  # this takes seconds
        Image.open(io.BytesIO(shot)).convert("RGB").save(out, "WEBP", lossless=True, quality=100, method=6)
        assert len(out.getvalue()) < MOST_BYTES
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.webp").write_bytes(out.getvalue())


def test_a_step(open_page: Callable[[str], Any], tmp_path: Path) -> None:
    page = open_page(made(tmp_path, "sim.run", "scenarios/1f1b_pp8.yaml"))
    keep("timeline", page, "#plots")


def test_a_step_zoomed_in(open_page: Callable[[str], Any], tmp_path: Path) -> None:
    page = open_page(made(tmp_path, "sim.run", "scenarios/tp8_sp.yaml"))
    page.set_viewport_size({"width": 1400, "height": 700})
    page.locator("#critical").check()
    page.evaluate(f"(r => r.setv({{start: 0.0400, end: 0.0455}}))({MODEL}('timeline').x_range)")
    page.wait_for_timeout(800)
    page.locator("#losses").evaluate("(e) => e.remove()")
    page.locator(".warnings, .cards").evaluate_all("(all) => all.map((e) => e.remove())")
    plot = page.locator("#plots .timeline-plot").bounding_box()
    for x in (0.52, 0.525):
        page.mouse.move(plot["x"] + x * plot["width"], plot["y"] + 26)
    keep("zoomed", page, "#plots")


def test_serving(open_page: Callable[[str], Any], tmp_path: Path) -> None:
    keep("serving", open_page(made(tmp_path, "sim.run", "scenarios/serve_preemption.yaml")), "#plots")


def test_a_comparison(open_page: Callable[[str], Any], tmp_path: Path) -> None:
    pair = ("scenarios/cpu/1f1b_pp2.yaml", "scenarios/measured/1f1b_pp2.json")
    keep("compare", open_page(made(tmp_path, "sim.compare", *pair)))


def test_a_search(open_page: Callable[[str], Any], tmp_path: Path) -> None:
    pages = made(tmp_path, "sim.search", "scenarios/search_llama3_8b.yaml", "--only", "cp=1", "--workers", "1")
    page = open_page(pages)
    page.wait_for_timeout(500)
    keep("search", page, "table")


def test_a_replay(open_page: Callable[[str], Any], tmp_path: Path) -> None:
    prefix = tmp_path / "step"
    words = (
        "-m",
        "sim.run",
        "scenarios/1f1b_pp8.yaml",
        "--set",
        "parallelism.pp=4",
        "--set",
        "training.global_batch_size=8",
        "--chakra",
        str(prefix),
    )
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, timeout=HANGS_AFTER_S)
    traces = sorted(map(str, tmp_path.glob("step.*.et")))
    change = ("--groups", f"{prefix}.groups.json", "--straggler", "1=1.3")
    keep("replay", open_page(made(tmp_path, "sim.replay", *traces, *change)))


def test_the_explorer(browser: Any) -> None:
    with running_explorer("scenarios/1f1b_pp8.yaml") as server:
        page = browser.new_page(viewport={"width": 1700, "height": 1000})
        visit(page, f"{server}?b.parallelism.schedule=zb_v&b.training.recompute=selective&critical=true")
        page.wait_for_timeout(1500)
        keep("explorer", page)
        page.close()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.webp")), ids=lambda p: p.stem)
def test_a_page_shows_it(path: Path) -> None:
    assert path.stat().st_size < MOST_BYTES
    pages = (ROOT / "docs").glob("*.md")
    assert any(f"(screenshots/{path.name})" in page.read_text("utf-8") for page in pages)
