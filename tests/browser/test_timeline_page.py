"""The timeline page in a real browser: what is drawn, what moves, what a mouse and a keyboard can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic

from sim.views.palette import KINDS
from sim.views.timeline_page import timeline_page

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
MODEL = "Bokeh.documents[0].get_model_by_name"


def make(critical: tuple[int, ...] = (), name: str = "1f1b_pp8", **shape: Any) -> tuple[str, Any]:
    timeline = synthetic.one_f_one_b(**shape)
    curves = synthetic.memory_curves(timeline)
    return timeline_page(synthetic.result_of(timeline, curves, name), timeline, curves, critical), timeline


def x_range(page: Any, plot: str) -> list[float]:
    return page.evaluate(f"[{MODEL}('{plot}').x_range.start, {MODEL}('{plot}').x_range.end]")


def frame(page: Any, name: str = "timeline") -> dict[str, float]:
    """The plot's inner frame on the screen, in pixels."""
    return page.evaluate(f"""() => {{
        const find = (view) => view.model.name === '{name}' ? view
            : [...(view.child_views ?? [])].map(find).find((v) => v)
        const view = [...Bokeh.index].map(find).find((v) => v)
        const box = view.el.getBoundingClientRect(), inner = view.frame.bbox
        return {{x: box.x + inner.x0, y: box.y + inner.y0, width: inner.width, height: inner.height}}
    }}""")


def at(page: Any, time_s: float, y: float) -> tuple[float, float]:
    """Where on the screen a point of the timeline lies."""
    box = frame(page)
    start, end = x_range(page, "timeline")
    top, bottom = page.evaluate(f"[{MODEL}('timeline').y_range.end, {MODEL}('timeline').y_range.start]")
    return (
        box["x"] + (time_s - start) / (end - start) * box["width"],
        box["y"] + (y - top) / (bottom - top) * box["height"],
    )


def shadow_text(page: Any, selector: str) -> str:
    """Text of the elements that match anywhere, shadow roots included."""
    return page.evaluate(
        """(selector) => {
        const all = (root) => [...root.querySelectorAll('*')].flatMap((e) =>
            [...(e.matches(selector) ? [e] : []), ...(e.shadowRoot ? all(e.shadowRoot) : [])])
        return all(document).map((e) => e.innerText).join('\\n')
    }""",
        selector,
    )


def test_every_span_is_drawn_in_the_colour_of_its_kind(open_page: Any, tmp_path: Path) -> None:
    html, timeline = make()
    page = open_page(html)
    for i, kind in enumerate(timeline.kinds):
        count, fill, visible = page.evaluate(
            f"(() => {{const r = {MODEL}('exact:{kind}'); "
            "return [r.data_source.data.start.length, r.glyph.fill_color.value, r.visible]})()"
        )
        assert count == int((timeline.kind == i).sum())
        assert fill == KINDS[kind].fill
        assert visible
    rows = page.evaluate("stepsim.data.rows")
    assert len(rows) == 8 * 4  # compute, dp, send, recv
    assert rows[0][:2] == ["ranks 0–7", "compute"]
    page.screenshot(path=tmp_path / "timeline.png", full_page=True)
    assert (tmp_path / "timeline.png").stat().st_size > 50_000


def test_pixels_of_forward_and_backward_are_on_the_screen(open_page: Any, tmp_path: Path) -> None:
    html, timeline = make()
    page = open_page(html)
    page.wait_for_timeout(300)
    box = frame(page)
    clip = {k: box[k] for k in ("x", "y", "width", "height")}
    page.screenshot(path=tmp_path / "plot.png", clip=clip, full_page=True)
    from PIL import Image

    image = Image.open(tmp_path / "plot.png").convert("RGB")
    colours = {colour: n for n, colour in image.getcolors(1 << 24)}
    area = image.width * image.height
    for kind in ("F", "B"):
        fill = tuple(bytes.fromhex(KINDS[kind].fill[1:]))
        busy = (timeline.end_s - timeline.start_s)[timeline.kind == timeline.kinds.index(kind)].sum()
        share = busy / timeline.step_time_s / 8 * 0.25  # a compute row takes about a quarter of a band
        assert colours.get(fill, 0) > 0.5 * share * area


def test_legend_hides_and_shows_a_kind_by_keyboard(open_page: Any) -> None:
    html, timeline = make()
    page = open_page(html)
    assert page.locator(".legend button").all_inner_texts() == [KINDS[k].label for k in KINDS if k in timeline.kinds]
    button = page.locator(".legend button[data-kind=F]")
    button.focus()
    page.keyboard.press("Enter")
    page.wait_for_function(f"{MODEL}('exact:F').visible === false")
    assert button.get_attribute("aria-pressed") == "false"
    page.keyboard.press("Enter")
    page.wait_for_function(f"{MODEL}('exact:F').visible === true")


def test_hover_tells_name_place_and_times(open_page: Any) -> None:
    html, _ = make()
    page = open_page(html)
    y = page.evaluate(f"{MODEL}('exact:F').data_source.data.y[0]")
    page.locator("#plots").scroll_into_view_if_needed()
    page.mouse.move(*at(page, 0.0045, y))
    page.mouse.move(*at(page, 0.005, y))
    page.wait_for_timeout(300)
    text = shadow_text(page, ".tip")
    for word in (
        "Forward: forward of stage 0",
        "ranks 0–7, compute",
        "stage 0, micro-batch 0",
        "10.00 ms, from 0 s",
        "cost: measured",
        "attention 3.10 ms",
    ):
        assert word in text


def test_zooming_moves_the_memory_plot_too(open_page: Any) -> None:
    html, timeline = make()
    page = open_page(html)
    whole = x_range(page, "timeline")
    assert whole == pytest.approx([0.0, timeline.step_time_s])
    page.locator("#plots").focus()
    page.keyboard.press("+")
    zoomed = x_range(page, "timeline")
    assert zoomed == pytest.approx([timeline.step_time_s / 4, timeline.step_time_s * 3 / 4])
    assert x_range(page, "memory") == zoomed
    page.locator("button[data-zoom=right]").click()
    assert x_range(page, "memory")[0] == pytest.approx(timeline.step_time_s * 3 / 8)
    page.locator("button[data-zoom=whole]").click()
    assert x_range(page, "memory") == pytest.approx(whole)


def test_dragging_across_zooms_in(open_page: Any) -> None:
    html, _ = make()
    page = open_page(html)
    page.locator("#plots").scroll_into_view_if_needed()
    page.mouse.move(*at(page, 0.1, 40))
    page.mouse.down()
    page.mouse.move(*at(page, 0.2, 60), steps=5)
    page.mouse.up()
    start, end = x_range(page, "timeline")
    assert start == pytest.approx(0.1, abs=0.01)
    assert end == pytest.approx(0.2, abs=0.01)
    assert x_range(page, "memory") == [start, end]


def test_bars_carry_micro_batches_where_there_is_room(open_page: Any) -> None:
    html, _ = make()
    page = open_page(html)
    far = page.evaluate(f"{MODEL}('labels').data_source.data.text")
    assert set(far) >= {"0", "1", "2"}
    page.evaluate(f"{MODEL}('timeline').x_range.setv({{start: 0, end: 0.05}})")
    page.wait_for_timeout(300)
    near = page.evaluate(f"[...{MODEL}('labels').data_source.data.text]")
    assert "Forward · micro-batch 0 · 10.00 ms" in near


def test_memory_follows_the_chosen_rank_and_shows_the_limit(open_page: Any) -> None:
    html, _ = make()
    page = open_page(html)
    shown = f"Math.max(...{MODEL}('memory:total').data_source.data.buffers) / 2**30"
    assert page.evaluate(shown) == pytest.approx(26.3)
    page.locator("#rank").select_option(index=7)
    assert page.evaluate(shown) == pytest.approx(3.7 + 6 + 12 + 0.6 + 0.5)
    limit = page.evaluate(f"{MODEL}('limit').glyph.y.value ?? {MODEL}('limit').data_source.data.y[0]")
    assert 70 * 2**30 < limit < 80 * 2**30  # what CUDA, its context and NCCL leave
    assert "that may be reserved" in page.locator("#memory-note").inner_text()


def test_rank_bars_and_headline_are_there(open_page: Any) -> None:
    html, _ = make()
    page = open_page(html)
    assert page.locator("#ranks .rankbar").count() == 8
    widths = page.locator("#ranks tbody tr:first-child .rankbar span").evaluate_all(
        "(spans) => spans.map((s) => s.getBoundingClientRect().width)"
    )
    assert widths[0] / sum(widths) == pytest.approx(0.486 / 0.816, abs=0.01)
    cards = page.locator(".card").all_inner_texts()
    assert any("Step time" in c and "815.8 ms" in c for c in cards)
    assert page.locator(".losses li").count() == 3


def test_critical_path_is_outlined_on_demand(open_page: Any) -> None:
    html, _ = make(critical=(0, 3, 5))
    page = open_page(html)
    assert page.evaluate(f"{MODEL}('critical').visible") is False
    page.locator("#critical").check()
    assert page.evaluate(f"{MODEL}('critical').visible") is True
    assert page.evaluate(f"{MODEL}('critical').data_source.data.start.length") == 3


def test_names_cannot_become_markup(open_page: Any) -> None:
    evil = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> $$x$$"
    html, _ = make(name=evil)
    page = open_page(html)
    assert page.evaluate("window.hacked") is None
    assert page.locator("h1").inner_text().startswith("</script>")


def test_of_very_many_spans_a_picture_is_drawn_and_each_one_when_zoomed(open_page: Any) -> None:
    timeline = synthetic.dense()
    page = open_page(timeline_page(synthetic.result_of(timeline, []), timeline, []))
    assert len(timeline) == 102_400
    visible = f"[{MODEL}('far').visible, {MODEL}('exact:F').visible]"
    page.wait_for_function(f"{MODEL}('far').data_source.data.image[0].some((p) => p > 0)")
    assert page.evaluate(visible) == [True, False]
    assert page.evaluate(f"{MODEL}('exact:F').data_source.data.start.length") == 0
    page.evaluate(f"{MODEL}('timeline').x_range.setv({{start: 0.1, end: 0.11}})")
    page.wait_for_function(f"{MODEL}('exact:F').visible")
    assert page.evaluate(visible) == [False, True]
    seen = (timeline.end_s > 0.1) & (timeline.start_s < 0.11)
    for kind in ("F", "B"):
        drawn = page.evaluate(f"{MODEL}('exact:{kind}').data_source.data.start.length")
        assert drawn == int((seen & (timeline.kind == timeline.kinds.index(kind))).sum())
    assert "every span" in page.locator("#view").inner_text()


def test_the_picture_shows_each_kind_where_it_fills_most_of_a_pixel(open_page: Any) -> None:
    html, timeline = make(p=8, m=700)
    page = open_page(html)
    assert len(timeline) > 5000
    page.evaluate(f"{MODEL}('timeline').x_range.setv({{start: 0.0, end: {timeline.step_time_s / 2}}})")
    page.wait_for_timeout(400)
    assert page.evaluate(f"{MODEL}('far').visible")
    pixels = np.array(page.evaluate(f"[...{MODEL}('far').data_source.data.image[0]]"), dtype=np.uint32)
    per_s = len(pixels) / (timeline.step_time_s / 2)
    busy = np.zeros((len(timeline.kinds), len(pixels)))
    edges = np.arange(len(pixels) + 1) / per_s
    rows = (timeline.class_index == 0) & (timeline.stream == timeline.streams.index("compute"))
    for kind in range(len(timeline.kinds)):
        mine = np.flatnonzero(rows & (timeline.kind == kind))
        ends = np.column_stack([timeline.start_s[mine], timeline.end_s[mine]]).ravel()
        length = timeline.end_s[mine] - timeline.start_s[mine]
        done = np.column_stack([np.cumsum(length) - length, np.cumsum(length)]).ravel()
        busy[kind] = np.diff(np.interp(edges, ends, done)) if len(mine) else 0.0
    fills = [int.from_bytes(bytes.fromhex(KINDS[k].fill[1:]), "little") for k in timeline.kinds]
    first, second = np.sort(busy, axis=0)[-1], np.sort(busy, axis=0)[-2]
    clear = first > second + 0.01 / per_s
    expected = np.array(fills)[busy.argmax(axis=0)]
    assert clear.mean() > 0.7
    assert ((pixels & 0xFFFFFF)[clear] == expected[clear]).mean() > 0.99
    opacity = pixels >> 24
    assert opacity[clear & (busy.sum(axis=0) * per_s > 0.99)].min() >= 250
    page.locator(".legend button[data-kind=F]").click()
    page.wait_for_timeout(400)
    hidden = np.array(page.evaluate(f"[...{MODEL}('far').data_source.data.image[0]]"), dtype=np.uint32)
    assert not ((hidden & 0xFFFFFF) == fills[timeline.kinds.index("F")]).any()


def test_hovering_over_the_picture_names_a_span(open_page: Any) -> None:
    timeline = synthetic.dense()
    page = open_page(timeline_page(synthetic.result_of(timeline, []), timeline, []))
    page.locator("#plots").scroll_into_view_if_needed()
    y = page.evaluate("(stepsim.data.rows[0][2] + stepsim.data.rows[0][3]) / 2")
    page.mouse.move(*at(page, 0.1, y))
    page.mouse.move(*at(page, 0.1002, y))
    page.wait_for_timeout(400)
    text = shadow_text(page, ".tip")
    assert "rank 0, compute" in text
    assert "more here: zoom in" in text
