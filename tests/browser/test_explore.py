"""The explorer in a real browser: choices redraw the step, illegal ones are explained, links restore, YAML saves."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from sim.core.units import change_percent, seconds
from sim.inputs.scenario import load_scenario
from sim.simulation import simulate
from tests.processes import HANGS_AFTER_S

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
SCENARIO = "scenarios/1f1b_pp8.yaml"
SMALLER = ("parallelism.pp=4", "training.global_batch_size=8")
HERE = "http://127.0.0.1:"
MODEL = "Bokeh.documents[0].get_model_by_name"

CRITICAL = """[...Bokeh.documents[0]._all_models.values()].filter((m) => m.name === 'critical' && m.glyph)
    .map((m) => m.visible)"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a running explorer."""
    with running_explorer(SCENARIO, *SMALLER) as address:
        yield address


@contextmanager
def running_explorer(scenario: str, *options: str) -> Iterator[str]:
    """An explorer, which must end cleanly on Ctrl-C."""
    command = [sys.executable, "-m", "sim.explore", scenario, "--port", "0"]
    command += [word for option in options for word in ("--set", option)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert running.stderr is not None
            line = running.stdout.readline()
            assert " at http://127.0.0.1:" in line, line + running.stderr.read()
            yield line.split(" at ")[1].split(" ")[0]
        finally:
            running.send_signal(signal.SIGINT)
            try:
                code = running.wait(timeout=HANGS_AFTER_S)
            finally:
                running.kill()
    assert code == 0


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1700, "height": 1100}, accept_downloads=True)
    opened = context.new_page()
    problems: list[str] = []
    strangers: list[str] = []
    opened.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("request", lambda r: None if r.url.startswith((HERE, "data:", "blob:")) else strangers.append(r.url))
    yield opened
    context.close()
    assert strangers == []
    assert problems == []


def visit(page: Any, url: str, words: str = "Step time") -> None:
    page.goto(url)
    page.wait_for_function(f"window.Bokeh && Bokeh.documents.length && {MODEL}('facts-b')?.text.includes('{words}')")


def test_it_says_what_it_waits_for(page: Any, server: str) -> None:
    there = http.client.HTTPConnection(urlsplit(server).netloc)
    there.request("GET", "/")
    assert b'<p id="loading" role="status">Loading' in there.getresponse().read()
    page.goto(server, wait_until="commit")
    page.wait_for_function(f"window.Bokeh && Bokeh.documents.length && {MODEL}('waiting')?.text.includes('Simulating')")
    page.wait_for_function(f"{MODEL}('facts-b')?.text.includes('Step time') && !{MODEL}('waiting')")
    assert page.locator("#loading").count() == 0


def choose(page: Any, name: str, option: str) -> None:
    """What a browser could send, be it an option or not."""
    page.evaluate(f"""() => {{
        const w = {MODEL}('{name}')
        w.value = '{option}'
        if ('value_throttled' in w.properties) w.value_throttled = '{option}'
    }}""")


def test_degrees_follow_each_other_so_that_gpus_stay(page: Any, server: str) -> None:
    visit(page, server)
    choose(page, "b.parallelism.tp", "2")
    page.wait_for_function("location.search === '?b.parallelism.tp=2&b.parallelism.pp=2'")
    assert "4 GPUs" in page.evaluate(f"{MODEL}('facts-b').text")
    choose(page, "b.parallelism.pp", "1")
    page.wait_for_function("location.search === '?b.parallelism.tp=2&b.parallelism.pp=1&b.parallelism.dp=2'")
    page.get_by_role("button", name="Keep GPUs").click()
    page.wait_for_function("location.search.includes('gpus=free')")
    choose(page, "b.parallelism.tp", "4")
    page.wait_for_function(f"{MODEL}('facts-b').text.includes('8 GPUs')")


def test_model_length_precision_and_framework_change_and_differences_are_told(page: Any, server: str) -> None:
    visit(page, server)
    choices = {"training.framework": "compiled", "training.seq_len": "4096", "training.precision": "fp8"}
    for key, value in choices.items():
        choose(page, f"b.{key}", value)
    choose(page, "b.model", "llama3.2-1b")
    page.wait_for_function(f"{MODEL}('facts-b').text.includes('llama3.2-1b')")
    options = [*SMALLER, *(f"{k}={v}" for k, v in choices.items()), "model=llama3.2-1b"]
    first, second = (simulate(load_scenario(ROOT / SCENARIO, o)).step_time_s for o in (SMALLER, options))
    shown = page.evaluate(f"{MODEL}('facts-b').text")
    assert seconds(second) in shown
    assert change_percent(second / first - 1) in shown
    assert "%;" not in page.evaluate(f"{MODEL}('facts-a').text")


@pytest.mark.parametrize("width", [480, 1440, 1920])
def test_it_fits_the_screen_and_turns_dark(page: Any, server: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 1000})
    visit(page, server)
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("getComputedStyle(document.body).backgroundColor === 'rgb(18, 24, 30)'")


def test_keyboard_works_illegal_choices_are_explained_and_others_ignored(page: Any, server: str) -> None:
    visit(page, f"{server}?gpus=free")
    choose(page, "a.parallelism.sp", "true")
    page.wait_for_function(f"{MODEL}('message-a').text.includes('Not possible')")
    assert "</b> parallelism.sp: found true; sequence" in page.evaluate(f"{MODEL}('message-a').text")
    page.wait_for_function(f"{MODEL}('verdict').text === ''")  # A shows what was possible before
    page.locator(".noUi-handle").first.focus()  # tensor parallel of A, which makes sp legal
    page.keyboard.press("ArrowRight")
    page.wait_for_function(f"!{MODEL}('message-a').text.includes('Not possible')")
    page.wait_for_function("location.search === '?a.parallelism.tp=2&a.parallelism.sp=true&gpus=free'")
    assert "tp 2" in page.evaluate(f"{MODEL}('facts-a').text")
    choose(page, "a.parallelism.schedule", "__import__")  # no option: nothing happens
    choose(page, "b.parallelism.dp", "2")
    both = "?a.parallelism.tp=2&a.parallelism.sp=true&b.parallelism.dp=2&gpus=free"
    page.wait_for_function(f"location.search === {both!r}")


def test_saved_yaml_is_the_chosen_scenario_and_links_give_options_only(page: Any, server: str, tmp_path: Path) -> None:
    choices = "a.parallelism.pp=8&a.training.recompute=full&a.cluster=dgx-h200"
    others = "a.parallelism.tp=3&b.cluster=/etc/passwd&a.model=no-such&b.parallelism.pp=%7B%7B1%7D%7D"
    visit(page, f"{server}?{choices}&{others}")
    assert page.evaluate(f"{MODEL}('b.cluster').value") == "as in the file"
    assert page.evaluate(f"{MODEL}('link').value") == choices
    with page.expect_download() as download:
        page.get_by_role("button", name="Save A as YAML").click()
    download.value.save_as(tmp_path / "saved.yaml")
    saved = load_scenario(tmp_path / "saved.yaml")
    assert (saved.parallelism.tp, saved.parallelism.pp, saved.cluster.name) == (1, 8, "dgx-h200")
    assert saved.training is not None
    assert saved.training.recompute.mode == "full"
    assert saved.calibration == "h200-sxm"


def test_the_critical_path_is_marked_on_demand_and_by_link(page: Any, server: str) -> None:
    visit(page, server)
    assert page.evaluate(CRITICAL) == [False, False]
    page.get_by_role("button", name="Highlight critical path").click()
    page.wait_for_function("location.search === '?critical=true'")
    assert page.evaluate(CRITICAL) == [True, True]
    choose(page, "a.parallelism.schedule", "gpipe")
    page.wait_for_function("location.search.includes('gpipe')")
    visit(page, page.url)
    assert page.evaluate(CRITICAL) == [True, True]


def test_a_serving_workload_is_explored_too(page: Any, tmp_path: Path) -> None:
    with running_explorer("scenarios/serve_llama8b.yaml", "inference.requests.count=40") as server:
        visit(page, f"{server}?b.inference.quantization=fp8", "Time to first token")
        assert "<b>B</b>: " in page.evaluate(f"{MODEL}('verdict').text")
        choose(page, "a.inference.requests.rate_per_s", "64")
        page.wait_for_function("location.search.includes('a.inference.requests.rate_per_s=64')")
        choose(page, "a.parallelism.tp", "64")
        page.wait_for_function(f"{MODEL}('message-a').text.includes('Not possible')")
        with page.expect_download() as download:
            page.get_by_role("button", name="Save B as YAML").click()
        download.value.save_as(tmp_path / "saved.yaml")
        page.goto("about:blank")
    saved = load_scenario(tmp_path / "saved.yaml")
    assert saved.inference is not None
    assert saved.inference.quantization == "fp8"


@pytest.mark.parametrize(("origin", "status"), [("http://evil.example", 403), ("http://127.0.0.1:{port}", 101)])
def test_web_sockets_of_other_origins_are_refused(server: str, origin: str, status: int) -> None:
    address = urlsplit(server)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=HANGS_AFTER_S)
    connection.request(
        "GET",
        "/ws",
        headers={
            "Origin": origin.format(port=address.port),
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": "x3JJHMbDL1EzLkh9GBhXDw==",
            "Sec-WebSocket-Version": "13",
        },
    )
    assert connection.getresponse().status == status
    connection.close()
