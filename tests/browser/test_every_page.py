"""Every kind of page on narrow, usual and wide screens, light and dark: nothing sticks out, all plots are drawn, tables
sort, what a legend hides is hidden, and text is told from its ground."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
from msgspec.structs import replace

from sim.search.found import BestLayout, ClusterSearch, several_searches
from sim.search.serving_found import (
    CurvePoint,
    FewestGpus,
    RefusedLayout,
    ServedRate,
    ServingLayout,
    ServingSearchResult,
)
from sim.serve.results.records import Percentiles
from sim.simulation import simulate
from sim.studies.difference import difference
from sim.views.clusters_page import clusters_page
from sim.views.difference import difference_page
from sim.views.map_page import map_page
from sim.views.search_page import search_page
from sim.views.serving_search_page import serving_search_page
from sim.views.timeline_page import StepDetails, timeline_page
from sim.views.topology_page import topology_page
from tests.browser.test_compare_page import compared
from tests.sim.cases import case
from tests.sim.commands.test_map import small
from tests.sim.search.test_search_page import result, row
from topology.presets import CLUSTERS

pytestmark = pytest.mark.browser
DIVIDERS = """(() => {
  const inside = (node) => [...node.querySelectorAll('*')].flatMap((e) => [
    ...(e.matches('.bk-divider') ? [getComputedStyle(e).backgroundColor] : []),
    ...(e.shadowRoot ? inside(e.shadowRoot) : [])])
  return inside(document)
})()"""
SCREENS = [(width, scheme) for width in (480, 1440, 1920) for scheme in ("light", "dark")]
LATENCIES = Percentiles(p50=0.01, p90=0.02, p95=0.025, p99=0.03, mean=0.012)
# Bokeh draws on a canvas; its plots tell what they drew.
SIZES = "Bokeh.documents[0].roots().map((r) => [r.name, r.inner_width, r.inner_height])"
LUMINANCE = """(selector) => {
  const [r, g, b] = getComputedStyle(document.querySelector(selector)).%s.match(/[\\d.]+/g).map(Number)
  return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255
}"""


def layouts() -> list[BestLayout]:
    return [row(0.5, 3 * 2.0**33), row(0.9, 2.0**32, schedule="zb_v", virtual_stages=2)]


def search() -> str:
    return search_page(result(layouts()))


def clusters() -> str:
    priced = [replace(one, cost_per_trillion_tokens=9e5) for one in layouts()]
    found = [
        ClusterSearch(name, result(best, price=2.5)) for name, best in (("dgx-h100", priced), ("dgx-b200", priced[1:]))
    ]
    none = replace(result([], price=2.5), why_none_legal="tp 16: must divide the GPUs of a node")
    found.append(ClusterSearch("a100-pcie", none))
    return clusters_page(several_searches((8,), found))


def serving_search() -> str:
    served = ServedRate(
        rate_per_s=12.5,
        requests=400,
        within_slo=True,
        share_within_slo=1.0,
        goodput_per_s=12.5,
        output_tokens_per_s=3600.0,
        output_tokens_per_s_per_gpu=900.0,
        time_to_first_token_s=LATENCIES,
        time_per_output_token_s=LATENCIES,
        inter_token_latency_s=LATENCIES,
        request_latency_s=LATENCIES,
        energy_kwh_per_million_output_tokens=0.4,
        cost_per_million_output_tokens=1.25,
    )
    options = {"max_batch_tokens": 512, "kv_cache.dtype": "fp8"}
    wide, deep = {"tp": 4, "pp": 1}, {"tp": 1, "pp": 4}
    unit = {"gpus": 4, "unit_gpus": 4, "limit_found": True}
    fast = ServingLayout(
        parallelism=wide | {"dp": 1}, unit=wide, options=options, rate_per_s=12.5, highest=served, **unit
    )
    none = ServingLayout(parallelism=deep | {"dp": 1}, unit=deep, options={}, rate_per_s=0.0, **unit)
    curve = [
        CurvePoint(
            parallelism={"tp": tp, "pp": 1},
            options={},
            rate_per_s_per_gpu=3.1,
            tokens_per_s_per_user=speed,
            output_tokens_per_s_per_gpu=900.0,
            within_slo=within,
        )
        for tp, speed, within in ((4, 50.0, True), (2, 60.0, False))
    ]
    return serving_search_page(
        ServingSearchResult(
            name="small",
            gpus=4,
            slo=("ttft_p99=0.25", "tpot_p99=0.035"),
            wanted_rate_per_s=20.0,
            best=(fast, none),
            fewest_gpus=FewestGpus(8, wide, {}),
            curve=tuple(curve),
            refusals=(RefusedLayout({"tp": 1, "pp": 1}, {}, "does not fit in memory"),),
            same_host_times=(),
        )
    )


def diff() -> str:
    a, b = (simulate(case({"tp": tp})).result for tp in (1, 2))
    return difference_page(difference(a, b))


def step() -> str:
    from sim.results.operator_times import time_by_operator, time_by_part

    done = simulate(case({"pp": 2, "tp": 2}), expand=True)
    details = StepDetails(time_by_operator(done), time_by_part(done), done.waits)
    return timeline_page(done.outcome, done.timeline, done.memory_over(1), done.critical_rows, details)


def diagnosis() -> str:
    from sim.traces.diagnosis import diagnose
    from sim.views.diagnosis import diagnosis_page
    from tests.sim.traces.test_diagnosis import joined, kernels

    recording = joined([kernels(rank, 4, 2.0 if rank == 2 else 1.0, 30.0, range(4)) for rank in range(4)])
    return diagnosis_page(diagnose(recording), recording)


def drawn_map() -> str:
    return map_page(small())


def topology() -> str:
    return topology_page(CLUSTERS["dgx-h100"])


EVERY = [search, clusters, serving_search, diff, diagnosis, step, drawn_map, compared, topology]


@pytest.mark.parametrize("make", EVERY)
def test_it_fits_every_screen_light_and_dark(open_page: Callable[[str], Any], make: Callable[[], str]) -> None:
    page = open_page(make())
    for width, scheme in SCREENS:
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(
            "(dark) => matchMedia('(prefers-color-scheme: dark)').matches === dark", arg=scheme == "dark"
        )
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (width, scheme)
        drawn = page.evaluate(f"window.Bokeh ? {SIZES} : []")
        assert all(w > 100 and h > 5 for _, w, h in drawn), (width, drawn)
        for _ in range(50):  # a busy machine takes its time to draw anew
            ground, ink = page.evaluate(LUMINANCE % "backgroundColor", "body"), page.evaluate(LUMINANCE % "color", "h1")
            if legible := (ground < 0.2 < 0.7 < ink) if scheme == "dark" else (ink < 0.3 < 0.9 < ground):
                break
            page.wait_for_timeout(100)
        assert legible, (scheme, ground, ink)
        for head in page.locator("main table th.num button").all()[:1]:
            head.click()
            assert page.locator("th[aria-sort]").count() >= 1


@pytest.mark.parametrize("make", EVERY)
def test_a_table_says_what_is_out_of_sight(open_page: Callable[[str], Any], make: Callable[[], str]) -> None:
    """The line above a table counts the columns that a person cannot see, until they were scrolled to."""
    page = open_page(make())
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true })")
    for width in (480, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(150)
        for box in page.locator("main .scroll").all():
            hint = box.locator("xpath=preceding-sibling::*[1]")
            hidden = box.evaluate("(b) => b.scrollWidth - b.clientWidth")
            assert ("to the right" in hint.text_content()) == (hidden > 1), width
            box.evaluate("(b) => { b.scrollLeft = b.scrollWidth; b.scrollTop = b.scrollHeight }")
            page.wait_for_timeout(50)
            assert hint.text_content() == ""


@pytest.mark.parametrize("make", [search, topology])
def test_a_plot_has_no_light_edge_on_a_dark_page(open_page: Callable[[str], Any], make: Callable[[], str]) -> None:
    from PIL import Image

    page = open_page(make())
    page.emulate_media(color_scheme="dark")
    page.reload()
    page.wait_for_function("document.documentElement.dataset.ready === 'true'")
    page.wait_for_function("Bokeh.documents[0].roots()[0].background_fill_color === '#12181e'")
    page.wait_for_timeout(300)
    shot = page.locator(".plot").first.screenshot()
    with Image.open(BytesIO(shot)) as image:
        edge = [image.convert("L").getpixel((0, y)) for y in range(1, image.height - 1)]
    assert max(edge) < 45
    dividers = page.evaluate(DIVIDERS)
    assert dividers
    assert all(colour == "rgb(44, 55, 66)" for colour in dividers), dividers  # --line of a dark page


def test_a_legend_stands_beside_its_plot_and_on_a_telephone_below_it(open_page: Callable[[str], Any]) -> None:
    page = open_page(clusters())
    plot = "Bokeh.documents[0].roots()[0]"
    for width, place in ((500, "below"), (1400, "right"), (500, "below")):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(f"{plot}.{place}.some((part) => part.type === 'Legend')")


@pytest.mark.parametrize(("make", "name"), [(clusters, "cluster:dgx-b200"), (serving_search, "layout:tp 2")])
def test_a_name_in_the_legend_hides_its_dots(open_page: Callable[[str], Any], make: Any, name: str) -> None:
    page = open_page(make())
    dots = f"Bokeh.documents[0].get_model_by_name('{name}')"
    assert page.evaluate(f"{dots}.visible")
    box = page.locator(".plot").first.bounding_box()
    legend = page.evaluate(
        "(() => { const p = Bokeh.documents[0].roots()[0];"
        " const l = Bokeh.index.roots[0].owner.query_one((v) => v.model.type === 'Legend').bbox;"
        " return [l.left, l.top, l.height] })()"
    )
    page.mouse.click(box["x"] + legend[0] + 18, box["y"] + legend[1] + 0.72 * legend[2])
    page.wait_for_function(f"!{dots}.visible")
