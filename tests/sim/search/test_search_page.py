"""The search's page: what it says, and that nothing from a scenario becomes markup."""

from __future__ import annotations

from typing import Any

from sim.views.search_page import mesh_words, schedule_words, search_page

LAYOUT = {
    "tp": 2,
    "sp": True,
    "cp": 1,
    "pp": 2,
    "dp": 2,
    "ep": 1,
    "zero": 1,
    "schedule": "1f1b",
    "virtual_stages": 1,
    "tp_overlap": "none",
    "micro_batch_size": 1,
    "recompute": "none",
}


def row(step_time_s: float, peak: float, **changes: Any) -> dict[str, Any]:
    return {
        "step_time_s": step_time_s,
        "tokens_per_s_per_gpu": 100 / step_time_s,
        "peak_memory_bytes": peak,
        "memory_limit_bytes": 80 * 2.0**30,
        "layout": {**LAYOUT, **changes},
    }


def result(rows: list[dict[str, Any]], name: str = "small") -> dict[str, Any]:
    return {
        "format": "sim-search/1",
        "name": name,
        "gpus": 8,
        "memory_limit_bytes": 80 * 2.0**30,
        "best": rows[:2],
        "pareto": rows,
        "evaluated": rows,
        "wall_s": 1.5,
        "cores": 2,
        "counts": {
            "legal": 102,
            "pruned_by_memory": 10,
            "too_large": 2,
            "pruned_by_bound": 70,
            "beaten": 13,
            "simulated": 7,
        },
    }


def test_page_shows_layouts_and_counts() -> None:
    html = search_page(result([row(0.5, 2.0**33), row(0.7, 2.0**32, schedule="zb_v", virtual_stages=2)]))
    assert "tp 2 with sp, pp 2, dp 2, ZeRO-1" in html
    assert "500.0 ms" in html
    assert "<dd>102<small>12 need too much memory</small>" in html
    assert "<dd>7<small>83 cannot be better</small>" in html
    assert "zb_v, 2 stages a rank" in html
    assert "ZeRO-1, overlap wgrad" in search_page(result([row(0.5, 2.0**33, tp_overlap="wgrad")]))
    assert "https://cdn" not in html


def test_page_escapes() -> None:
    html = search_page(result([row(0.5, 2.0**33, recompute="<script>alert(1)</script>")], "<b>name</b>"))
    assert "<script>alert(1)" not in html
    assert "<b>name</b>" not in html


def test_page_without_a_layout_that_fits() -> None:
    html = search_page(result([]))
    assert "no legal layout fits" in html
    assert 'data-table="best"' not in html


def test_words() -> None:
    assert mesh_words({**LAYOUT, "tp": 1, "sp": False, "pp": 1, "dp": 1, "zero": 0}) == "one device"
    assert schedule_words({**LAYOUT, "pp": 1}) == "no pipeline"
