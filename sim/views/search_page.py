"""The standalone page of a search: simulated layouts by time and memory, the Pareto line, the best in a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim.core.units import allocated_reserved, count, counted, n_bytes, seconds
from sim.search.found import BestLayout, FoundLayout, SearchResult
from sim.search.space import Layout
from sim.views.headline import Number
from sim.views.page import still_page
from sim.views.palette import BAD, INK
from sim.views.scatter import explained, grouped_dots, scatter_plot
from sim.views.scenario_words import layout_words
from sim.views.sorted_table import NOTHING, Cell, share, sorted_table, word

COLUMNS = {  # of a table of layouts: heads, and what they mean
    "Layout": "the mesh and ZeRO stage",
    "Step": "seconds a step",
    "Tokens/s/GPU": "",
    "MFU": "model FLOPs over the peak",
    "Exposed": "communication that no computation hides",
    "Bubble": "of the step",
    "Memory": "the fullest GPU's peak: allocated / reserved",
    "Schedule": "",
    "Micro-batch": "sequences",
    "Recompute": "",
}
COSTS = {  # of a training on the layout: heads, and what they mean
    "Days": "of the whole training, without failures",
    "Cost": "of the whole training's GPU hours, in the currency of the price",
    "Cost of 1T tokens": "of GPU hours, in the currency of the price",
}
_TICKS = "return (tick / 2 ** 30).toFixed(Math.abs(ticks[1] - ticks[0]) < 2 ** 30 ? 1 : 0) + ' GiB'"
_TIP = (
    "<div><b>@words</b><div>@step a step, @memory</div>"
    "<div>@schedule, micro-batch @size, recompute @recompute</div></div>"
)


def search_page(result: SearchResult) -> str:
    """HTML of a search that opens without network."""
    of = f"{counted(result.gpus, 'GPU')}, {limit_words(result)}"
    front = sorted_table("pareto", COLUMNS, [cells(row) for row in result.pareto])
    rows = [[*cells(row), *cost_cells(row)] for row in result.best]
    best = sorted_table("best", {**COLUMNS, **COSTS}, rows, [copied(row) for row in result.best])
    return still_page(
        "search.html",
        f"Search: {result.name}",
        {"search": _figure(result)},
        what="; ".join(filter(None, (of, unfinished_words(result)))),
        headline=_headline(result),
        tables=[("Best layouts", best), ("Pareto line", front)],
    )


def unfinished_words(result: SearchResult) -> str:
    """Return that Ctrl-C ended the search, and how many layouts it had not looked at; nothing of a finished one."""
    if result.unexamined is None:
        return ""
    left = counted(result.unexamined, "layout")
    return f"INCOMPLETE, ended by Ctrl-C: {left} not looked at, among which faster ones may be"


def limit_words(found: SearchResult) -> str:
    """Return what a search's layouts may take of a GPU; a trainer's communicators differ by layout."""
    limits = [row.memory_limit_bytes for row in found.best] or [found.memory_limit_bytes]
    least, most = n_bytes(min(limits)), n_bytes(max(limits))
    if least != most:
        return f"at most {least} to {most} each, by layout"
    return f"at most {most} each"


def memory_words(row: FoundLayout) -> str:
    """Return what tensors take of the fullest GPU, and what its allocator reserves."""
    return allocated_reserved(row.peak_memory_bytes, row.peak_reserved_bytes)


def copied(row: BestLayout) -> list[tuple[str, str]]:
    """Return what a layout's buttons copy: its scenario's file, the command that runs it, a trainer's flags."""
    run = row.runnable
    texts = [] if run is None else [("YAML", run.yaml), ("Command", run.command), ("Flags", run.flags)]
    return [(name, text) for name, text in texts if text]


def cost_cells(row: BestLayout) -> list[Cell]:
    """Days of the whole training, where its tokens are given, and costs, where prices are given."""
    run, days = row.training_run, NOTHING
    if run is not None:
        days = f"{run.days:.6f}", f"{run.days:,.1f}"
    costs = (row.training_cost, row.cost_per_trillion_tokens if run is None else None)
    return [days, *(NOTHING if cost is None else (f"{cost:.3f}", count(cost)) for cost in costs)]


def mesh_words(layout: Layout, short: bool = False) -> str:
    """A mesh, its ZeRO stage and `tp_overlap` in one line, in few characters or in words."""
    overlap = layout.tp_overlap
    said = [] if overlap == "none" else [overlap if short else f"overlap {overlap}"]
    return (" " if short else ", ").join([*layout_words(layout._asdict(), short), *said])


def schedule_words(layout: Layout) -> str:
    """The schedule with its stages per rank; none where there is no pipeline."""
    if layout.pp == 1:
        return "no pipeline"
    stages = f", {layout.virtual_stages} stages a rank" if layout.virtual_stages > 1 else ""
    return f"{layout.schedule}{stages}"


def _figure(result: SearchResult) -> Any:
    from bokeh.models import AdaptiveTicker, ColumnDataSource, CustomJSTickFormatter, Range1d

    rows = result.evaluated
    plot = scatter_plot("search", "step time in seconds", "peak memory of the fullest GPU", 460)
    plot.yaxis.ticker = AdaptiveTicker(base=1024, mantissas=[2.0**i for i in range(10)], desired_num_ticks=5)
    plot.yaxis.formatter = CustomJSTickFormatter(code=_TICKS)
    by_schedule: dict[str, list[FoundLayout]] = {}
    for row in rows:
        name = "no pipeline" if row.layout.pp == 1 else row.layout.schedule
        by_schedule.setdefault(name, []).append(row)
    groups = {name: _columns(mine) for name, mine in by_schedule.items()}
    dots = grouped_dots(plot, "schedule", groups, size=8, fill_alpha=0.6)
    line = _columns(result.pareto)
    if len(line["x"]) > 1:
        look = {"mode": "after", "color": INK, "line_width": 2, "legend_label": "Pareto line", "level": "underlay"}
        plot.step("x", "y", source=ColumnDataSource(line), name="pareto", **look)
    limit = result.memory_limit_bytes
    highest = max(line["y"], default=limit)
    highest = max([highest, *(r.peak_memory_bytes for r in rows)])
    least = min([r.peak_memory_bytes for r in rows], default=0.0)
    top = max(highest, limit if limit < 2 * highest else highest)
    plot.y_range = Range1d(start=max(0.0, least - 0.15 * (top - least)), end=top + 0.08 * (top - least or top))
    plot.hspan(y=limit, line_color=BAD, line_width=2, line_dash="dashed", name="limit")
    return explained(plot, dots, _TIP)


def layout_columns(rows: Sequence[FoundLayout]) -> dict[str, list[Any]]:
    """Return the columns of a dot's hint on each layout."""
    return {
        "words": [mesh_words(r.layout) for r in rows],
        "step": [seconds(r.step_time_s) for r in rows],
        "throughput": [count(r.tokens_per_s_per_gpu) for r in rows],
        "memory": [memory_words(r) for r in rows],
        "schedule": [schedule_words(r.layout) for r in rows],
        "size": [r.layout.micro_batch_size for r in rows],
        "recompute": [r.layout.recompute for r in rows],
    }


def _columns(rows: Sequence[FoundLayout]) -> dict[str, list[Any]]:
    places = {"x": [r.step_time_s for r in rows], "y": [r.peak_memory_bytes for r in rows]}
    return {**places, **layout_columns(rows)}


def _headline(result: SearchResult) -> list[Number]:
    c = result.counts
    numbers = [Number("Best step", "none", "no legal layout fits", "bad")]
    if result.best:
        best = result.best[0]
        numbers = [
            Number("Best step", seconds(best.step_time_s), mesh_words(best.layout), "good"),
            Number("Tokens/s/GPU", count(best.tokens_per_s_per_gpu), schedule_words(best.layout)),
            Number("Its memory", memory_words(best), f"recompute {best.layout.recompute}"),
        ]
    large, slow = count(c["pruned_by_memory"] + c["too_large"]), count(c["pruned_by_bound"] + c["beaten"])
    cores = counted(result.cores, "core")
    return [
        *numbers,
        Number("Legal layouts", count(c["legal"]), f"{large} need too much memory"),
        Number("Simulated", count(c["simulated"]), f"{slow} cannot be better"),
        Number("Search", seconds(result.wall_s), cores),
    ]


def cells(row: FoundLayout, short: bool = False) -> list[Cell]:
    """A layout's cells under `COLUMNS`, its mesh in few characters or in words; only the best layouts have an MFU and
    what goes with it."""
    x, means, tight = row.layout, None, ""
    if isinstance(row, BestLayout):
        means, tight = row.means, f", tight {100 * row.fit_odds:.0f} %" * row.tight
    return [
        word(mesh_words(x, short)),
        (f"{row.step_time_s:.12f}", seconds(row.step_time_s)),
        (f"{row.tokens_per_s_per_gpu:.6f}", count(row.tokens_per_s_per_gpu)),
        share(None if means is None else means.mfu),
        share(None if means is None else means.exposed_comm_s / row.step_time_s),
        share(None if means is None else means.bubble_fraction),
        (f"{row.peak_memory_bytes:.0f}", memory_words(row) + tight),
        word(schedule_words(x)),
        word(str(x.micro_batch_size)),
        word(x.recompute),
    ]
