"""The standalone page of a search over several clusters or numbers of GPUs: the best layouts of each, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.core.units import count, counted, percent, seconds
from sim.search.found import ClusterSearch, ClustersResult
from sim.views.headline import Number
from sim.views.page import still_page
from sim.views.scatter import explained, grouped_dots, scatter_plot
from sim.views.search_page import COLUMNS, COSTS, cells, copied, cost_cells, layout_columns, memory_words, mesh_words
from sim.views.sorted_table import NOTHING, Cell, sorted_table, word

PLACE = {"Cluster": "", "GPUs": ""}  # the first columns of a table of several searches
NONE_FITS = "no legal layout fits in memory"
_TIP = "<div><b>@cluster: @words</b></div><div>@step a step, @throughput tokens/s/GPU, @memory</div>"


def clusters_page(result: ClustersResult) -> str:
    """HTML of a search of several clusters that opens without network."""
    found = [one for one in result.clusters if one.search.best]
    return still_page(
        "clusters.html",
        f"Clusters: {result.name}",
        {"clusters": _figure(result, found)} if found else {},
        what=result.what + f"; {interrupted_words(result)}" * result.interrupted,
        headline=_headline(result, found),
        of="number of GPUs" if result.of_sizes else "cluster",
        table=sorted_table(
            "clusters",
            {**PLACE, **COLUMNS, **COSTS},
            [[*place_cells(result, one), *cells(row), *cost_cells(row)] for one in found for row in one.search.best],
            [copied(row) for one in found for row in one.search.best],
            wide=len(PLACE),
        ),
        without=[
            (name_of(result, one), one.search.why_none_legal or NONE_FITS)
            for one in result.clusters
            if one not in found
        ],
    )


def place_cells(result: ClustersResult, one: ClusterSearch) -> list[Cell]:
    """The cells under `PLACE` of one of several searches: what tells it from the others."""
    gpus = one.search.gpus
    named = f"{one.cluster} ({one.search.not_measured})" if one.search.not_measured else one.cluster
    return [word(named) if one.cluster else NOTHING, (f"{gpus}.0", f"{gpus:,}") if result.of_sizes else NOTHING]


def interrupted_words(result: ClustersResult) -> str:
    """Return that Ctrl-C ended the searches, and what they have not looked at."""
    ended = [one for one in result.clusters if one.search.unexamined is not None]
    said = [f"{name_of(result, one)} is not searched to its end" for one in ended]
    said += [f"{counted(result.unsearched, 'search')} not begun"] if result.unsearched else []
    return f"INCOMPLETE, ended by Ctrl-C: {', '.join(said)}"


def name_of(result: ClustersResult, one: ClusterSearch) -> str:
    """One of several searches, by what tells it from the others."""
    return ", ".join(filter(None, (one.cluster, counted(one.search.gpus, "GPU") if result.of_sizes else "")))


def _headline(result: ClustersResult, found: Sequence[ClusterSearch]) -> list[Number]:
    if not found:
        return [Number("Best layout", "none", "no legal layout fits on any", "bad")]
    quickest = max(found, key=lambda one: one.search.best[0].tokens_per_s_per_gpu)
    best = quickest.search.best[0]
    numbers = [
        Number("Most tokens/s/GPU", name_of(result, quickest), count(best.tokens_per_s_per_gpu), "good"),
        Number("Its step", seconds(best.step_time_s), mesh_words(best.layout)),
        Number("Its MFU", percent(best.means.mfu), memory_words(best)),
    ]
    priced = [(cost, one) for one in found if (cost := one.search.best[0].cost_per_trillion_tokens) is not None]
    if priced:
        cost, least = min(priced, key=lambda pair: pair[0])
        note = f"{count(cost)} a trillion tokens at {least.search.price_per_gpu_hour:g} a GPU hour"
        numbers.append(Number("Least cost", name_of(result, least), note, "good"))
    runs = [(run.days, one) for one in found if (run := one.search.best[0].training_run) is not None]
    if runs:
        days, soonest = min(runs, key=lambda pair: pair[0])
        numbers.append(Number("Fewest days", f"{days:,.1f}", name_of(result, soonest), "good"))
    return numbers


def _figure(result: ClustersResult, found: Sequence[ClusterSearch]) -> Any:
    plot = scatter_plot("clusters", "peak memory of the fullest GPU in GiB", "tokens/s/GPU")
    groups = {
        name_of(result, one): {
            "x": [r.peak_memory_bytes / 2**30 for r in one.search.best],
            "y": [r.tokens_per_s_per_gpu for r in one.search.best],
            "cluster": [name_of(result, one)] * len(one.search.best),
            **layout_columns(one.search.best),
        }
        for one in found
    }
    dots = grouped_dots(plot, "cluster", groups, size=10, fill_alpha=0.7)
    return explained(plot, dots, _TIP)
