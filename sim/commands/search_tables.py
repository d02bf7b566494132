"""Tables that `sim.search` prints: the best layouts, the command of the first, the best of several clusters; its
progress."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sim.core.long_runs import lines_while
from sim.core.units import counted, n_bytes, seconds

if TYPE_CHECKING:
    from pathlib import Path

    from sim.search.best_first import BestFirst
    from sim.search.found import BestLayout, ClusterSearch, ClustersResult, SearchResult
    from sim.search.runnable import Runnable
    from sim.views.sorted_table import Cell
    from sim.views.terminal import Terminal, TextTable

FOUND = re.compile(r"found [^;]*; ")
TIED = 0.02  # of a step: errors of one scenario differ by more between quiet real runs (docs/real_runs.md)
NOT_TRIED = (  # where no layout fits
    "Not tried: more GPUs (--gpus N), states on the host (training.optimizer_offload, parameter_offload), adapters "
    "(training.lora), their frozen weights in 4 bits (training.lora.weights=nf4)."
)
LOOK_EVERY_S = 0.25
REFUSALS_SHOWN = 3  # the most frequent; --json has all


@contextmanager
def progress() -> Iterator[Callable[[BestFirst], None]]:
    """A bar on standard error if that is a terminal, else lines there if it takes long."""
    if not sys.stderr.isatty():
        yield from _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(12), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, due_s = bar.add_task("starting", total=1.0), 0.0

        def look(search: BestFirst) -> None:
            nonlocal due_s
            if (now_s := time.monotonic()) >= due_s:  # there are thousands of results a second, and parts to count
                bar.update(task, completed=search.progress, description=_so_far(search))
                due_s = now_s + LOOK_EVERY_S

        yield look


def _lines() -> Iterator[Callable[[BestFirst], None]]:
    begin_s = time.monotonic()
    seen: list[BestFirst] = []

    def line() -> str:
        so_far = _so_far(seen[-1]) if seen else "starting"
        return f"searching for {time.monotonic() - begin_s:,.0f} s: {so_far}; --only narrows a search"

    def look(search: BestFirst) -> None:
        seen[:] = [search]

    with lines_while(line):
        yield look


def _so_far(search: BestFirst) -> str:
    """How many of the layouts were looked at or ruled out, and the best one so far."""
    if search.meshes_bounded < search.meshes:
        of = f"{search.meshes_bounded:,} of {counted(search.meshes, 'mesh')} of tp, cp, pp, dp and ep"
        return f"first, bounds of all layouts: {of} done, {counted(search.counts['legal'], 'layout')} so far"
    from sim.views.search_page import mesh_words

    c, best = search.counts, min(search.fitting, key=lambda o: o.step_time_s, default=None)
    found = f"; best {seconds(best.step_time_s)}: {mesh_words(best.layout, short=True)}" if best is not None else ""
    looked_at = f"{c['evaluated']:,} evaluated, {search.ruled_out:,} ruled out of {counted(c['legal'], 'layout')}"
    return looked_at + found


def print_result(result: SearchResult, saved: Path | None = None) -> None:
    """A table of the best layouts, what was looked at, and what runs the first of them. `saved`: the folder of their
    files."""
    from sim.views.search_page import limit_words, unfinished_words
    from sim.views.sorted_table import word
    from sim.views.terminal import PIPED_WIDTH, standard_output

    terminal = standard_output(PIPED_WIDTH)
    c = result.counts
    if said := unfinished_words(result):
        terminal.print(said, "bold")
    terminal.print(f"{result.name}: {counted(result.gpus, 'GPU')}, {limit_words(result)}")
    if not c["legal"]:
        with_only = " with these values of --only" * bool(result.only or result.linked)
        terminal.print(f"No layout is legal{with_only}: {result.why_none_legal}")
        return
    if result.best:
        terminal.print_table(_table([""], (([word(str(number))], row) for number, row in enumerate(result.best, 1))))
    else:
        terminal.print(_none_fits(result))
    took = f"{result.wall_s:.1f} s on {counted(result.cores, 'core')}"
    left = f", {result.unexamined:,} not looked at" if result.unexamined is not None else ""
    terminal.print(f"{_counts_words(c)}{left}; {took}")
    for reason in _reasons(refusal.reason for refusal in result.refusals)[:REFUSALS_SHOWN]:
        terminal.print(f"refused: {reason}")
    if tied := _tied(result.best):
        terminal.print(tied)
    if any(row.tight for row in result.best):
        said = "tight: the odds that it fits, by the known error of predictions; --memory-limit leaves such layouts out"
        terminal.print(said)
    overlaps = {row.layout.tp_overlap for row in result.best if row.layout.tp > 1} - {"none"}
    if overlaps:
        terminal.print(f"{', '.join(sorted(overlaps))}: parallelism.tp_overlap")
    if result.best and (run := result.best[0].runnable) is not None:
        _print_runnable(run, len(result.best), saved, terminal)


def _tied(best: Sequence[BestLayout]) -> str:
    """Say how many of the first layouts are too close to the fastest to be told from it; nothing if none is."""
    near = sum(row.step_time_s <= best[0].step_time_s * (1 + TIED) for row in best)
    which = f"layouts 1 to {near} are within {TIED:.0%}".replace("%", " %")
    return f"{which}, too close to tell which is fastest: measure them, or prefer less memory" if near > 1 else ""


def _none_fits(result: SearchResult) -> str:
    """Say that no layout fits, and how much memory the smallest would need."""
    if result.counts["refused"] or result.too_large_bytes is None:
        return "No legal layout fits in memory and can be simulated."
    least = f"at least {n_bytes(result.too_large_bytes)} on its fullest GPU"
    return f"No legal layout fits in memory; the one that needs least needs {least}.\n{NOT_TRIED}"


def _reasons(reasons: Iterable[str]) -> list[str]:
    """The most frequent reason of each rule; reasons of one rule differ in the value that was found."""
    by_rule: dict[str, str] = {}
    for reason in reasons:
        by_rule.setdefault(FOUND.sub("", reason, count=1), reason)
    return list(by_rule.values())


def _print_runnable(first: Runnable, listed: int, saved: Path | None, terminal: Terminal) -> None:
    """How the first of the listed layouts is run, and where the files of all are."""
    terminal.print(f"layout 1: {first.command}", whole=True)
    if first.flags is not None:
        terminal.print(f"\n{first.flags}\n", whole=True)
    else:
        terminal.print(
            "--for megatron|torchtitan searches only layouts that this trainer can run, and prints its flags"
        )
    if saved is None:
        terminal.print("--save FOLDER writes each layout as a scenario; --json has the commands of all")
        return
    files = f"{saved / '1.yaml'}" + f" to {saved / f'{listed}.yaml'}" * (listed > 1)
    terminal.print(f"wrote {files}; days of a training: stepsim run {saved / '1.yaml'} --tokens 15T", whole=True)


def print_clusters(result: ClustersResult) -> None:
    """The best layout of each cluster, most tokens a second and GPU first, or least cost where prices are given; of
    several numbers of GPUs, those of the fewest first."""
    from sim.views.clusters_page import NONE_FITS, PLACE, interrupted_words, name_of, place_cells
    from sim.views.terminal import PIPED_WIDTH, standard_output

    terminal = standard_output(PIPED_WIDTH)
    if result.interrupted:
        terminal.print(interrupted_words(result), "bold")
    terminal.print(f"{result.name}: {result.what}")

    def rank(one: ClusterSearch) -> tuple[int, bool, float]:
        best = one.search.best[0]
        cost = best.cost_per_trillion_tokens
        return one.search.gpus, cost is None, cost if cost is not None else -best.tokens_per_s_per_gpu

    found = [one for one in result.clusters if one.search.best]
    if found:
        rows = ((place_cells(result, one), one.search.best[0]) for one in sorted(found, key=rank))
        terminal.print_table(_table(PLACE, rows))
    for one in result.clusters:
        if not one.search.best:
            why = one.search.why_none_legal or NONE_FITS
            terminal.print(f"{name_of(result, one)}: {why}")
    for one in found:
        if (run := one.search.best[0].runnable) is not None:
            words = f"{name_of(result, one)}: {run.command}"
            terminal.print(words, whole=True)


def _table(first: Iterable[str], rows: Iterable[tuple[Sequence[Cell], BestLayout]]) -> TextTable:
    """Layouts, each behind the cells of the `first` columns."""
    from sim.views.search_page import COLUMNS, COSTS, cells, cost_cells
    from sim.views.sorted_table import as_printed, sorted_table

    head = {**dict.fromkeys(first, ""), **COLUMNS, **COSTS}
    return as_printed(sorted_table("", head, [[*own, *cells(row, short=True), *cost_cells(row)] for own, row in rows]))


def _counts_words(c: Mapping[str, int]) -> str:
    """The number of legal layouts by outcome."""
    fates = [
        f"{c['too_large']:,} did not fit",
        f"{c['beaten']:,} slower even if no links are shared",
        *([f"{c['refused']:,} refused"] if c["refused"] else []),
        f"{c['simulated']:,} simulated",
    ]
    return (
        f"{c['legal']:,} legal layouts: {c['pruned_by_memory']:,} need too much memory, "
        f"{c['pruned_by_bound']:,} have a lower bound of time that is too long, "
        f"{c['evaluated']:,} evaluated ({', '.join(fates)})"
    )
