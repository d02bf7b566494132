"""Tables that `sim.search` prints: the best layouts, the command of the first, the best of several clusters; its
progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sim.commands.rich_tables import console_of, plain_table
from sim.core.units import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from sim.search.best_first import BestFirst

REFUSALS_SHOWN = 3  # the most frequent; --json has all


@contextmanager
def progress() -> Iterator[Callable[[BestFirst], None]]:
    """A bar on standard error, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def report(search: BestFirst) -> None:
            c = search.counts
            best = min((o.step_time_s for o in search.fitting), default=None)
            text = f"{counted(c['legal'], 'layout')}, {c['evaluated']:,} evaluated" + (
                f", best {best:.4g} s" if best is not None else ""
            )
            bar.update(task, completed=search.progress, description=text)

        yield report


def print_result(result: dict[str, Any]) -> None:
    """A table of the best layouts, what was looked at, and what runs the first of them."""
    from sim.views.headline import limit_words

    console = console_of()
    c = result["counts"]
    console.print(f"{result['name']}: {counted(result['gpus'], 'GPU')}, {limit_words(result)}", highlight=False)
    if not c["legal"]:
        with_only = " with these values of --only" * bool(result["only"] or result["linked"])
        console.print(f"No layout is legal{with_only}: {result['why_none_legal']}", highlight=False, markup=False)
        return
    if result["best"]:
        table = _table("", priced=result["price_per_gpu_hour"] is not None)
        for number, row in enumerate(result["best"], 1):
            table.add_row(str(number), *_cells(row))
        console.print(table)
    else:
        fits = "No legal layout fits in memory" + (" and can be simulated." if c["refused"] else ".")
        console.print(fits, highlight=False)
    took = f"{result['wall_s']:.1f} s on {counted(result['cores'], 'core')}"
    console.print(f"{_counts_words(c)}; {took}", highlight=False)
    for refusal in result["refusals"][:REFUSALS_SHOWN]:
        console.print(f"refused: {refusal['reason']}", highlight=False, markup=False)
    if result["best"]:
        _print_runnable(result["best"][0], console)


def _print_runnable(row: dict[str, Any], console: Console) -> None:
    plain: Any = {"highlight": False, "markup": False, "soft_wrap": True}
    console.print(f"layout 1: {row['command']}", **plain)
    if "flags" in row:
        console.print(f"\n{row['flags']}\n", **plain)
    console.print("--save FOLDER writes each layout as a scenario; --json has the commands of all", **plain)


def print_clusters(result: dict[str, Any]) -> None:
    """The best layout of each cluster, most tokens a second and GPU first, or least cost where prices are given."""
    console = console_of()
    console.print(
        f"{result['name']}: the best layout of {counted(result['gpus'], 'GPU')} of each cluster", highlight=False
    )
    priced = any(one["price_per_gpu_hour"] is not None for one in result["clusters"])
    table = _table("cluster", priced)
    table.columns[0].justify = "left"

    def rank(one: dict[str, Any]) -> tuple[bool, float]:
        best = one["best"][0]
        cost = best.get("cost_per_trillion_tokens")
        return cost is None, cost if cost is not None else -best["tokens_per_s_per_gpu"]

    for one in sorted((one for one in result["clusters"] if one["best"]), key=rank):
        table.add_row(one["cluster"], *_cells(one["best"][0], "-" * priced))
    if table.row_count:
        console.print(table)
    for one in result["clusters"]:
        if not one["best"]:
            why = one["why_none_legal"] or "no legal layout fits in memory"
            console.print(f"{one['cluster']}: {why}", highlight=False, markup=False)
    for one in result["clusters"]:
        if one["best"]:
            said = f"{one['cluster']}: {one['best'][0]['command']}"
            console.print(said, highlight=False, markup=False, soft_wrap=True)


def _table(first: str, priced: bool) -> Table:
    table = plain_table()
    figures = ("step", "tok/s/GPU", "MFU", "exposed", "bubble", "GiB")
    names = (first, *figures, "layout", "schedule", "micro-batch", "recompute")
    for name in (*names, *(["1T tokens"] if priced else [])):
        words = name in ("layout", "schedule", "recompute")
        table.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    return table


def _cells(row: dict[str, Any], unpriced: str = "") -> list[str]:
    """Texts of a layout; `unpriced`: in place of a cost where others have one."""
    from sim.core.units import seconds
    from sim.views.headline import layout_words

    x, cost = row["layout"], row.get("cost_per_trillion_tokens")
    schedule = x["schedule"] + (f" x{x['virtual_stages']}" if x["virtual_stages"] > 1 else "")
    return [
        seconds(row["step_time_s"]),
        f"{row['tokens_per_s_per_gpu']:,.0f}",
        f"{row['mfu']:.1%}",
        f"{row['exposed_comm_s'] / row['step_time_s']:.1%}" if row["step_time_s"] else "-",
        f"{row['bubble_fraction']:.1%}",
        f"{row['peak_memory_bytes'] / 2**30:.1f}",
        " ".join(layout_words(x, short=True)),
        schedule if x["pp"] > 1 else "-",
        str(x["micro_batch_size"]),
        x["recompute"],
        *([unpriced] if cost is None and unpriced else [] if cost is None else [f"{cost:,.0f}"]),
    ]


def _counts_words(c: dict[str, int]) -> str:
    """The number of legal layouts by outcome."""
    fates = [
        f"{c['too_large']:,} did not fit",
        f"{c['beaten']:,} slower even with unshared links",
        *([f"{c['refused']:,} refused"] if c["refused"] else []),
        f"{c['simulated']:,} simulated",
    ]
    return (
        f"{c['legal']:,} legal layouts: {c['pruned_by_memory']:,} need too much memory, "
        f"{c['pruned_by_bound']:,} have a lower bound of time that is too long, "
        f"{c['evaluated']:,} evaluated ({', '.join(fates)})"
    )
