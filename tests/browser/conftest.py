"""A real Chromium, offline: pages must need no network. Skips, with the reason, where there is none."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sim" / "views"))

QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


HANGS_AFTER_MS = 180_000  # a page is drawn within a second; a machine that others use may take far longer


class Browser:
    """A browser whose pages wait long before they give up."""

    def __init__(self, started: Any) -> None:
        self._started = started

    def new_context(self, **options: Any) -> Any:
        """Return a context whose pages wait so long."""
        context = self._started.new_context(**options)
        context.set_default_timeout(HANGS_AFTER_MS)
        return context

    def new_page(self, **options: Any) -> Any:
        """Return a page that waits so long."""
        page = self._started.new_page(**options)
        page.set_default_timeout(HANGS_AFTER_MS)
        return page


@pytest.fixture(scope="module")  # Playwright's event loop would be in the way of other modules' own
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=list(QUIET))
        yield Browser(started)
        started.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Writes HTML to a file, opens it offline, waits until it is drawn; nothing may go wrong."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.set_offline(True)
    problems: list[str] = []
    requests: list[str] = []

    def opened(html: str) -> Any:
        file = tmp_path / "page.html"
        file.write_text(html, encoding="utf-8")
        page = context.new_page()
        page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda r: requests.append(r.url))
        page.goto(file.as_uri())
        page.wait_for_function("document.documentElement.dataset.ready === 'true'")
        return page

    yield opened
    context.close()
    assert [u for u in requests if not u.startswith(("file:", "data:", "blob:"))] == []
    assert problems == []
