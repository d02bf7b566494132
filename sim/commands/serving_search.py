"""Tables that `sim.search --slo` prints: each layout's highest rate, the fewest GPUs, throughput against
interactivity."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from sim.core.units import as_written, counted
from sim.search.serving_found import FewestGpus, ServingLayout, ServingSearchResult

CURVE_SHOWN = 12
REFUSED_SHOWN = 3  # layouts of one reason; --json has all
DEGREES = {"tp", "pp", "dp", "ep"}  # of replicas; pools for prompts and tokens have others
NO_YES = ("no", "yes")
CURVE = {  # columns of the curve, and their keys
    "tok/s/user": "tokens_per_s_per_user",
    "tok/s/GPU": "output_tokens_per_s_per_gpu",
    "offered requests/s/GPU": "rate_per_s_per_gpu",
}


def print_serving_search(result: ServingSearchResult, top: int, command: Sequence[str]) -> None:
    """A table of the best layouts, the fewest GPUs for the scenario's own rate, and the curve. `command`: what
    simulates the searched scenario."""
    from sim.views.serving_search_page import layouts_table, row_words, same_host_words, searched_words
    from sim.views.sorted_table import as_printed
    from sim.views.terminal import PIPED_WIDTH, Column, TextRow, TextTable, standard_output

    terminal = standard_output(PIPED_WIDTH)
    terminal.print(f"{result.name}: {searched_words(result)}")
    if result.best:
        terminal.print_table(as_printed(layouts_table(result, result.best[:top])))
    if words := _fewest_words(result, command):
        terminal.print(words, whole=True)
    for engines in result.same_host_times:
        terminal.print(same_host_words(engines))
    for words in refused_words((row_words(each), each.reason) for each in result.refusals):
        terminal.print(words)
    shown = result.curve[:: max(1, len(result.curve) // CURVE_SHOWN)]
    if shown:
        terminal.print("throughput against speed for a user (best of all layouts and rates):")
        columns = *(Column(head, right=True) for head in CURVE), Column("within limits"), Column("layout", wraps=True)
        rows = [
            TextRow((*(f"{getattr(p, key):,.4g}" for key in CURVE.values()), NO_YES[p.within_slo], row_words(p)))
            for p in shown
        ]
        terminal.print_table(TextTable(columns, rows, gap=2))


def refused_words(refusals: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each reason why layouts were not simulated; `refusals`: a layout in words, and its reason.

    >>> refused_words([("tp 1", "does not fit"), ("tp 3", "must divide heads"), ("tp 2", "does not fit")])
    ['not simulated: tp 1; tp 2: does not fit', 'not simulated: tp 3: must divide heads']
    """
    by_reason: dict[str, list[str]] = {}
    for layout, reason in refusals:
        by_reason.setdefault(reason, []).append(layout)
    lines = []
    for reason, layouts in by_reason.items():
        left = len(layouts) - REFUSED_SHOWN
        more = f" and {counted(left, 'other layout')}" if left > 0 else ""
        lines.append(f"not simulated: {'; '.join(layouts[:REFUSED_SHOWN])}{more}: {reason}")
    return lines


def sets_of_serving(layout: FewestGpus | ServingLayout) -> list[str]:
    """A found layout, and its options of the engine, as KEY=VALUE; of several pairs of pools one."""
    pools = {key: n for key, n in layout.parallelism.items() if key.startswith(("prefill_", "decode_"))}
    degrees = {key: n for key, n in layout.parallelism.items() if key not in (*pools, "services")}
    sets = [f"parallelism.{key}={n}" for key, n in degrees.items()]
    sets += ["inference.disaggregated.{}.{}={}".format(*key.split("_", 1), n) for key, n in pools.items()]
    return [*sets, *(f"inference.{key}={as_written(value)}" for key, value in layout.options.items())]


def _fewest_words(result: ServingSearchResult, command: Sequence[str]) -> str:
    """The fewest GPUs that carry the scenario's own rate, or why there are none; nothing where it has no rate."""
    from sim.views.serving_search_page import NO_LIMIT, nearest_words, row_words

    wanted, fewest = result.wanted_rate_per_s, result.fewest_gpus
    if fewest is not None:
        layout = f" ({row_words(fewest)})" if fewest.gpus > 1 else ""
        said = f"the fewest GPUs for {wanted:g} requests/s: {counted(fewest.gpus, 'GPU')}{layout}"
        if not fewest.parallelism.keys() <= DEGREES:
            return said
        words = [*command, *(word for option in sets_of_serving(fewest) for word in ("--set", option))]
        tried = f"replicas of at most {counted(result.gpus, 'GPU')} were tried, --gpus N tries larger ones"
        return f"{said}; {tried}\nto simulate them: {shlex.join(words)}"
    if wanted is not None and any(not row.limit_found for row in result.best):
        return f"the fewest GPUs for {wanted:g} requests/s: {NO_LIMIT}"
    if not result.best:
        return "no layout can be simulated; --gpus N searches layouts of N GPUs"
    return nearest_words(result)
