"""The standalone page of a search over several clusters: the best layout of each, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.core.units import count, counted, n_bytes, percent, seconds
from sim.search.found import ClusterSearch, ClustersResult
from sim.views.headline import Number
from sim.views.page import still_page
from sim.views.scatter import explained, grouped_dots, scatter_plot
from sim.views.search_page import COLUMNS, cells, copied, cost_cell, layout_columns, mesh_words
from sim.views.sorted_table import sorted_table, word

NONE_FITS = "no legal layout fits in memory"
_TIP = "<div><b>@cluster: @words</b></div><div>@step a step, @throughput tokens/s/GPU, @memory</div>"


def clusters_page(result: ClustersResult) -> str:
    """HTML of a search of several clusters that opens without network."""
    found = [one for one in result.clusters if one.search.best]
    return still_page(
        "clusters.html",
        f"Clusters: {result.name}",
        {"clusters": _figure(found)} if found else {},
        what=f"the best layouts of {counted(result.gpus, 'GPU')} of each cluster",
        headline=_headline(found),
        table=sorted_table(
            "clusters",
            {"Cluster": "", **COLUMNS, "Cost of 1T tokens": "of GPU hours, in the currency of the price"},
            [[word(one.cluster), *cells(row), cost_cell(row)] for one in found for row in one.search.best],
            [copied(row) for one in found for row in one.search.best],
            wide=1,
        ),
        without=[(one.cluster, one.search.why_none_legal or NONE_FITS) for one in result.clusters if one not in found],
    )


def _headline(found: Sequence[ClusterSearch]) -> list[Number]:
    if not found:
        return [Number("Best cluster", "none", "no legal layout fits on any", "bad")]
    quickest = max(found, key=lambda one: one.search.best[0].tokens_per_s_per_gpu)
    best = quickest.search.best[0]
    numbers = [
        Number("Most tokens/s/GPU", quickest.cluster, count(best.tokens_per_s_per_gpu), "good"),
        Number("Its step", seconds(best.step_time_s), mesh_words(best.layout)),
        Number("Its MFU", percent(best.means.mfu), n_bytes(best.peak_memory_bytes)),
    ]
    priced = [(cost, one) for one in found if (cost := one.search.best[0].cost_per_trillion_tokens) is not None]
    if priced:
        cost, least = min(priced, key=lambda pair: pair[0])
        note = f"{count(cost)} a trillion tokens at {least.search.price_per_gpu_hour:g} a GPU hour"
        numbers.append(Number("Least cost", least.cluster, note, "good"))
    return numbers


def _figure(found: Sequence[ClusterSearch]) -> Any:
    plot = scatter_plot("clusters", "peak memory of the fullest GPU in GiB", "tokens/s/GPU")
    groups = {
        one.cluster: {
            "x": [r.peak_memory_bytes / 2**30 for r in one.search.best],
            "y": [r.tokens_per_s_per_gpu for r in one.search.best],
            "cluster": [one.cluster] * len(one.search.best),
            **layout_columns(one.search.best),
        }
        for one in found
    }
    dots = grouped_dots(plot, "cluster", groups, size=10, fill_alpha=0.7)
    return explained(plot, dots, _TIP)
