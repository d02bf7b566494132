"""What a person does with a timeline: pin, measure, search, choose rows, share a link, take tables away, go dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sim.commands.step_run import page_of
from sim.inputs.scenario import load_scenario
from sim.simulation import Simulation, simulate
from tests.browser.test_timeline_page import MODEL, at, frame, x_range

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
INK = f"({MODEL}('memory').yaxis?.[0]?.major_label_text_color ?? {MODEL}('memory').left[0].major_label_text_color)"
WIDTHS = (480, 1440, 1920)
SCREENS = ((480, "dark"), (1440, "light"), (1920, "dark"))


@pytest.fixture(scope="module")
def step() -> Simulation:
    return simulate(load_scenario(ROOT / "scenarios" / "1f1b_pp8.yaml"), expand=True)


@pytest.fixture(scope="module")
def file(step: Simulation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("page") / "step.html"
    written.write_text(page_of(step, step.memory_over(1)), encoding="utf-8")
    return written


@pytest.fixture(scope="module", params=SCREENS, ids=lambda screen: f"{screen[0]} {screen[1]}")
def shared(browser: Any, file: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """One page for all tests here, on each of the screens; nothing may go wrong on it."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    context.set_offline(True)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    visit(page, file.as_uri())
    yield page
    context.close()
    assert problems == []


def visit(page: Any, address: str) -> None:
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_function("document.documentElement.dataset.ready === 'true'")


@pytest.fixture
def page(shared: Any, file: Path) -> Any:
    """The page as it opens."""
    shared.wait_for_timeout(200)  # the address follows a little later
    shared.evaluate("location.hash = `nothing=${performance.now()}`")  # an address that differs from every one before
    shared.wait_for_function("[...document.querySelectorAll('#pinned, #measured')].every((e) => e.hidden)")
    shared.locator("#plots").scroll_into_view_if_needed()
    return shared


def middle_of(page: Any, row: int) -> float:
    return page.evaluate(f"(stepsim.data.rows[{row}][2] + stepsim.data.rows[{row}][3]) / 2 + stepsim.shift[{row}]")


def row_of(page: Any, track: str, stream: str) -> int:
    return page.evaluate("stepsim.data.rows").index(
        next(r for r in page.evaluate("stepsim.data.rows") if r[:2] == [track, stream])
    )


def span(step: Simulation, rank: int, kind: str, micro_batch: int) -> tuple[float, float]:
    """Start and end of an action, as the engine has them."""
    found = next(s for s in step.timeline.spans() if (s.rank, s.kind, s.micro_batch) == (rank, kind, micro_batch))
    return found.start_s, found.end_s


def click_on(page: Any, row: int, time_s: float) -> None:
    page.mouse.click(*at(page, time_s, middle_of(page, row)))
    page.wait_for_selector("#pinned:visible")


def test_keys_work_on_a_fresh_page(page: Any, step: Simulation) -> None:
    page.keyboard.press("w")
    start, end = x_range(page, "timeline")
    assert end - start == pytest.approx(step.step_time_s / 2)
    page.keyboard.press("d")
    assert x_range(page, "timeline")[0] > start
    page.keyboard.press("0")
    assert x_range(page, "timeline") == pytest.approx([0.0, step.step_time_s])


def test_zooming_by_key_stays_under_the_pointer(page: Any, step: Simulation) -> None:
    x, y = at(page, 0.2 * step.step_time_s, 10)
    page.mouse.move(x, y)
    page.keyboard.press("w")
    page.keyboard.press("w")
    assert at(page, 0.2 * step.step_time_s, 10)[0] == pytest.approx(x, abs=2)
    page.keyboard.press("0")


def test_nothing_is_drawn_of_spans_out_of_view(page: Any, step: Simulation) -> None:
    start, end = span(step, 3, "B", 9)
    page.evaluate(f"{MODEL}('timeline').x_range.setv({{start: {start + 0.01}, end: {end - 0.01}}})")
    page.wait_for_timeout(200)
    drawn = page.evaluate(f"""Object.keys(stepsim.data.kinds).flatMap((k) => {{
        const c = {MODEL}('exact:' + k).data_source.data
        return Array.from(c.start, (s, i) => [s, c.end[i]]) }})""")
    assert 0 < len(drawn) < 30
    assert all(a < end - 0.01 and b > start + 0.01 for a, b in drawn)


def test_a_click_pins_a_span_with_its_operators_and_what_waits(page: Any, step: Simulation) -> None:
    waits, spans = step.waits, list(step.timeline.spans())
    held = set(waits.after.tolist())
    i = next(i for i, s in enumerate(spans) if s.kind == "B" and s.micro_batch > 4 and waits.task[i] in held)
    chosen = spans[i]
    click_on(page, row_of(page, f"rank {chosen.rank}", "compute"), (chosen.start_s + chosen.end_s) / 2)
    text = page.locator("#pinned").inner_text()
    assert f"micro-batch {chosen.micro_batch}" in text
    assert "attention_backward" in text
    listed = page.locator("#pinned button[data-span]").evaluate_all("(all) => all.map((b) => Number(b.dataset.span))")
    of = "stepsim.args.spans.data"
    times = page.evaluate(f"(list) => list.map((i) => [{of}.start[i], {of}.end[i]])", listed)
    assert chosen.start_s in [b for _, b in times]  # what it waited for ends where it starts
    assert len([a for a, _ in times if a == chosen.end_s]) == int((waits.after == waits.task[i]).sum())
    sums = page.evaluate("""stepsim.data.operators.flatMap((runs) =>
        runs.map(([s, rows]) => [s, rows.reduce((n, r) => n + r[2], 0)]))""")
    assert len(sums) > 5
    assert all(total == pytest.approx(seconds, rel=1e-6) for seconds, total in sums)
    title = page.locator("#pinned h3").inner_text()
    page.locator("#pinned button[data-span]").first.click()
    assert page.locator("#pinned h3").inner_text() != title
    page.keyboard.press("Escape")
    assert page.locator("#pinned").is_hidden()


def test_what_a_span_waited_for_ends_where_it_starts(step: Simulation) -> None:
    waits, timeline = step.waits, step.timeline
    assert len(waits.task) == len(timeline)
    ends = dict(zip(waits.task.tolist(), timeline.end_s.tolist(), strict=True))
    held = [i for i, after in enumerate(waits.after.tolist()) if after >= 0]
    assert len(held) > 0.9 * len(timeline)
    assert all(ends[waits.after[i]] == timeline.start_s[i] for i in held)


def test_a_range_is_summed_up(page: Any, step: Simulation) -> None:
    whole, box = step.step_time_s, frame(page)
    y = box["y"] + 20
    page.keyboard.press("m")
    page.mouse.move(at(page, 0.25 * whole, 10)[0], y)
    page.mouse.down()
    page.mouse.move(at(page, 0.75 * whole, 10)[0], y, steps=4)
    page.mouse.up()
    page.keyboard.press("m")
    a, b = (float(page.evaluate(f"{MODEL}('range').{side}")) for side in ("left", "right"))
    assert [a, b] == pytest.approx([0.25 * whole, 0.75 * whole], abs=0.01 * whole)
    assert x_range(page, "timeline") == pytest.approx([0.0, whole])
    cells = page.locator("#measured tbody tr", has_text="Backward").first.locator("td").all_inner_texts()
    spans = [s for s in step.timeline.spans() if s.kind == "B"]
    mean_s = sum(max(0.0, min(s.end_s, b) - max(s.start_s, a)) for s in spans) / 8
    assert cells[1] in (f"{mean_s:.3f} s", f"{mean_s * 1e3:.1f} ms")
    rank = page.locator("#measured tbody tr", has_text="rank 3").locator("td").all_inner_texts()
    shares = [float(x.removesuffix(" %")) for x in rank[1:]]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    page.locator("#measured").get_by_role("button", name="Zoom to it").click()
    assert x_range(page, "timeline") == pytest.approx([a, b])


def test_search_counts_marks_and_goes_to_the_next(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("backward rank 3 micro-batch 7")
    assert page.locator("#search-note").inner_text() == "1 found, Enter for the next"
    assert page.evaluate(f"{MODEL}('found').data_source.data.start.length") == 1
    page.keyboard.press("Enter")
    assert "rank 3, compute" in page.locator("#pinned").inner_text()
    assert "micro-batch 7" in page.locator("#pinned").inner_text()
    page.locator("#search").fill("cross_entropy")  # an operator within the last stage's bars
    assert page.locator("#search-note").inner_text() == "64 found, Enter for the next"
    page.locator("#search").fill("no such thing")
    assert page.locator("#search-note").inner_text() == "none found"
    page.keyboard.press("Escape")


def test_rows_collapse_are_chosen_and_left_out_where_nothing_runs(page: Any) -> None:
    shown = "stepsim.data.rows.filter((_, r) => !stepsim.hiddenRows.has(r)).map((r) => r.slice(0, 2))"
    tall = page.evaluate(f"{MODEL}('timeline').height")
    rows = page.evaluate(shown)
    assert ["rank 0", "send"] in rows
    assert ["rank 0", "model"] not in rows
    page.locator("#empty-rows").check()
    assert ["rank 0", "model"] in page.evaluate(shown)
    page.locator("#empty-rows").uncheck()
    box = frame(page)
    page.mouse.click(max(25, box["x"] - 100), at(page, 0.0, middle_of(page, row_of(page, "rank 1", "compute")))[1])
    rows = page.evaluate(shown)
    assert [r for r in rows if r[0] == "rank 1"] == [["rank 1", "compute"]]
    assert ["rank 2", "send"] in rows
    page.keyboard.press("c")
    page.keyboard.press("c")
    assert {stream for _, stream in page.evaluate(shown)} == {"compute"}
    assert page.evaluate(f"{MODEL}('timeline').height") < tall
    page.locator("#ranks-shown").fill("2-3, 7")
    assert page.evaluate(shown) == [[f"rank {r}", "compute"] for r in (2, 3, 7)]
    page.wait_for_timeout(100)
    assert set(page.evaluate(f"[...{MODEL}('exact:F').data_source.data.row]")) == {
        row_of(page, f"rank {r}", "compute") for r in (2, 3, 7)
    }


def test_a_link_opens_the_same_view(page: Any, step: Simulation, file: Path) -> None:
    start, end = span(step, 5, "F", 20)
    page.evaluate(f"{MODEL}('timeline').x_range.setv({{start: {start - 0.1}, end: {end + 0.1}}})")
    page.locator("#ranks-shown").fill("4-6")
    page.wait_for_timeout(200)
    click_on(page, row_of(page, "rank 5", "compute"), (start + end) / 2)
    page.locator(".legend button[data-kind=SEND_F]").click()
    title = page.locator("#pinned").inner_text()
    page.wait_for_function("location.hash.includes('pin=') && location.hash.includes('hide=')")
    link = page.url
    visit(page, link)
    assert x_range(page, "timeline") == pytest.approx([start - 0.1, end + 0.1], abs=1e-6)
    assert page.locator("#ranks-shown").input_value() == "4-6"
    assert page.locator("#pinned").inner_text() == title
    assert page.locator(".legend button[data-kind=SEND_F]").get_attribute("aria-pressed") == "false"
    assert page.url == link


def test_a_link_opened_while_the_address_is_due_is_not_written_over(page: Any) -> None:
    page.evaluate("""() => {
        const late = window.setTimeout, due = []
        window.setTimeout = (write) => due.push(write)  // the page writes its address a little after a change
        document.querySelector('#empty-rows').click()
        window.setTimeout = late
        location.hash = "ranks=2"
        due.forEach((write) => write()) }""")
    page.wait_for_function("document.querySelector('#ranks-shown').value === '2'")
    assert page.url.endswith("#ranks=2")


def test_the_axis_stays_in_sight(page: Any) -> None:
    page.evaluate("document.querySelector('#plots').scrollIntoView(); window.scrollBy(0, 250)")
    top = page.locator(".sticky-axis").bounding_box()["y"]
    assert top == pytest.approx(0, abs=1)
    assert x_range(page, "axis") == x_range(page, "timeline")
    assert frame(page, "axis")["x"] == pytest.approx(frame(page)["x"], abs=1)
    assert frame(page, "axis")["width"] == pytest.approx(frame(page)["width"], abs=1)


def test_tables_sort_and_go_away_as_csv(page: Any) -> None:
    table = page.locator("#memory-table table")
    table.get_by_role("button", name="Peak").click()
    peaks = [float(x.split()[0]) for x in table.locator("tbody td:nth-child(2)").all_inner_texts()]
    assert peaks == sorted(peaks)
    assert table.locator("th[aria-sort=ascending]").inner_text() == "Peak"
    page.locator("#memory-table .copy-csv").click()
    lines = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert lines[0].startswith(",Peak,Reserved,Parameters")
    assert len(lines) == 9


def test_dark_by_system_and_by_button(page: Any) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"{INK} === '#5b6875'")
    light = page.evaluate(paper)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{paper} !== {light!r} && {INK} === '#a3afbb'")
    page.locator("#theme").click()
    assert page.evaluate(paper) == light
    assert page.evaluate(INK) == "#5b6875"
    page.evaluate("localStorage.clear()")
    page.emulate_media(color_scheme="light")


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_the_screen(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 1000})
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    used = page.locator("main").bounding_box()["width"]
    assert used > 0.95 * width - 15
    peak = page.locator("#memory-table th", has_text="Peak").bounding_box()
    assert peak["x"] + peak["width"] < width
    page.set_viewport_size({"width": 1440, "height": 1000})


def test_a_few_of_many_ranks_get_rows_of_the_usual_height(open_page: Any) -> None:
    """64 ranks do not fit with rows of 27 pixels; three of them do."""
    jitter = ["parallelism.dp=64", "training.global_batch_size=64", "faults.jitter.sigma=0.05"]
    many = simulate(load_scenario(ROOT / "scenarios" / "dp8.yaml", jitter), expand=True)
    page = open_page(page_of(many, many.memory_over(1)))
    heights = f"[...{MODEL}('rows').data_source.data.height]"
    assert max(page.evaluate(heights)) < 0.86 * 27
    page.locator("#ranks-shown").fill("7-9")
    shown = page.evaluate(heights)
    assert max(shown) == pytest.approx(0.86 * 27)
    page.wait_for_timeout(200)
    row = row_of(page, "rank 8", "compute")
    assert page.evaluate(f"stepsim.rowAt({middle_of(page, row)})") == row
    page.locator("#ranks-shown").fill("")
    assert max(page.evaluate(heights)) < 0.86 * 27
