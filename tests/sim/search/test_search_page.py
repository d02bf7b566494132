"""The search's page: what it says, and that nothing from a scenario becomes markup."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from sim.commands.search_tables import print_result
from sim.inputs.scenario import Scenario, parse_scenario
from sim.search.evaluation import LayoutMeans
from sim.search.found import BestLayout, SearchResult
from sim.search.runnable import Runnable
from sim.search.space import Layout
from sim.views.search_page import _columns, mesh_words, schedule_words, search_page

LAYOUT = Layout(
    tp=2,
    sp=True,
    cp=1,
    pp=2,
    dp=2,
    ep=1,
    zero=1,
    schedule="1f1b",
    virtual_stages=1,
    tp_overlap="none",
    micro_batch_size=1,
    recompute="none",
)
RUNNABLE = Runnable("stepsim run x", "model: llama3-8b\n")
COUNTS = {"legal": 102, "pruned_by_memory": 10, "too_large": 2, "pruned_by_bound": 70, "beaten": 13, "simulated": 7}
COUNTS |= {"refused": 0, "evaluated": 22}


@cache
def small() -> Scenario:
    return parse_scenario(
        {"model": "gpt2", "cluster": "dgx-h100", "training": {"seq_len": 128, "global_batch_size": 1}}
    )


def row(step_time_s: float, peak: float, runnable: Runnable | None = RUNNABLE, **changes: Any) -> BestLayout:
    """A layout with these keys changed."""
    return BestLayout(
        step_time_s=step_time_s,
        tokens_per_s_per_gpu=100 / step_time_s,
        peak_memory_bytes=peak,
        peak_reserved_bytes=1.25 * peak,
        layout=LAYOUT._replace(**changes),
        parallelism={},
        means=LayoutMeans(0.4, step_time_s / 10, 0.1),
        memory_limit_bytes=80 * 2.0**30,
        tight=False,
        fit_odds=1.0,
        scenario=small(),
        runnable=runnable,
    )


def result(rows: Sequence[BestLayout], name: str = "small", price: float | None = None) -> SearchResult:
    return SearchResult(
        name=name,
        gpus=8,
        objective="step_time",
        memory_limit_bytes=80 * 2.0**30,
        only={},
        linked=(),
        trainer=None,
        best=tuple(rows[:2]),
        pareto=tuple(rows),
        evaluated=tuple(rows),
        counts=COUNTS,
        why_none_legal="",
        too_large_bytes=None,
        refusals=(),
        wall_s=1.5,
        cores=2,
        cpu_s={},
        rates={},
        price_per_gpu_hour=price,
    )


def test_a_layouts_dot_lies_at_its_step_time_and_its_memory() -> None:
    """Seconds to the right, bytes upwards."""
    places = _columns([row(0.5, 2.0**33), row(0.7, 2.0**32)])
    assert (places["x"], places["y"]) == ([0.5, 0.7], [2.0**33, 2.0**32])


def test_page_shows_layouts_and_counts() -> None:
    html = search_page(result([row(0.5, 2.0**33), row(0.7, 2.0**32, schedule="zb_v", virtual_stages=2)]))
    assert "tp 2 with sp, pp 2, dp 2, ZeRO-1" in html
    assert "500.0 ms" in html
    assert "<dd>102<small>12 need too much memory</small>" in html
    assert "<dd>7<small>83 cannot be better</small>" in html
    assert "zb_v, 2 stages a rank" in html
    assert "ZeRO-1, overlap wgrad" in search_page(result([row(0.5, 2.0**33, tp_overlap="wgrad")]))
    assert "https://cdn" not in html


def test_the_table_says_which_layouts_are_too_close_to_tell_apart(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(result([row(0.5, 2.0**33), row(0.509, 2.0**32)]))
    assert "layouts 1 to 2 are within 2 %, too close to tell" in " ".join(capsys.readouterr().out.split())
    for rows in ([row(0.5, 2.0**33), row(0.511, 2.0**32)], [row(0.5, 2.0**33)]):
        print_result(result(rows))
        assert "too close" not in capsys.readouterr().out


def test_page_escapes() -> None:
    html = search_page(result([row(0.5, 2.0**33, recompute="<script>alert(1)</script>")], "<b>name</b>"))
    assert "<script>alert(1)" not in html
    assert "<b>name</b>" not in html


def test_page_without_a_layout_that_fits() -> None:
    html = search_page(result([]))
    assert "no legal layout fits" in html
    assert 'data-table="best"' not in html


def test_words() -> None:
    assert mesh_words(LAYOUT._replace(tp=1, sp=False, pp=1, dp=1, zero=0)) == "one device"
    assert schedule_words(LAYOUT._replace(pp=1)) == "no pipeline"
