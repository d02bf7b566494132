"""Tables that `sim.search --slo` prints: each layout's highest rate, the fewest GPUs, throughput against
interactivity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from sim.commands.rich_tables import console_of, plain_table
from sim.core.units import counted

if TYPE_CHECKING:
    from rich.table import Table

CURVE_SHOWN = 12
JsonRow = Mapping[str, Any]
HEADS = (
    "requests/s",
    "tok/s/GPU",
    "first token p50, p99",
    "a token p50, p99",
    "next token p99",
    "kWh of 1M tokens",
)
CURVE = {  # columns of the curve, and their keys
    "tok/s/user": "tokens_per_s_per_user",
    "tok/s/GPU": "output_tokens_per_s_per_gpu",
    "requests/s/GPU": "rate_per_s_per_gpu",
}


def print_serving_search(result: dict[str, Any], top: int) -> None:
    """A table of the best layouts, the fewest GPUs for the scenario's own rate, and the curve."""
    from sim.search.engine_options import choice_words

    console = console_of()
    say = partial(console.print, highlight=False)
    say(f"{result['name']}: {counted(result['gpus'], 'GPU')} within {', '.join(result['slo'])}")
    with_options = any(row["options"] for row in result["best"])

    def table(heads: Iterable[str], rows: Iterable[tuple[Iterable[str], JsonRow]]) -> Table:
        """Columns of figures, each row's layout and, where any are searched, its options."""
        out = plain_table()
        for head in heads:
            out.add_column(head, justify="right")
        out.add_column("layout")
        if with_options:
            out.add_column("options")
        for figures, row in rows:
            options = [choice_words(row["options"])] if with_options else []
            out.add_row(*figures, _words(row["parallelism"]), *options)
        return out

    priced = any("cost_per_million_output_tokens" in row for row in result["best"])
    if result["best"]:
        best = ((_cells(row, priced), row) for row in result["best"][:top])
        console.print(table((*HEADS, "cost of 1M tokens") if priced else HEADS, best))
    if words := _fewest_words(result):
        say(words)
    for refusal in result["refusals"]:
        say(f"not simulated: {_with_options(refusal)}: {refusal['reason']}", markup=False)
    shown = result["curve"][:: max(1, len(result["curve"]) // CURVE_SHOWN)]
    if shown:
        say("throughput against speed for a user (best of all layouts and rates):")
        points = (([f"{point[key]:,.4g}" for key in CURVE.values()], point) for point in shown)
        console.print(table(CURVE, points))


def _fewest_words(result: JsonRow) -> str:
    """The fewest GPUs that carry the scenario's own rate, or why there are none; nothing where it has no rate."""
    from sim.views.serving_search_page import NO_LIMIT

    wanted, fewest = result["wanted_rate_per_s"], result["fewest_gpus"]
    if fewest is not None:
        return f"the fewest GPUs for {wanted:g} requests/s: {counted(fewest['gpus'], 'GPU')} ({_with_options(fewest)})"
    if wanted is not None and any(not row["limit_found"] for row in result["best"]):
        return f"the fewest GPUs for {wanted:g} requests/s: {NO_LIMIT}"
    if not result["best"]:
        return "no layout can be simulated"
    return "" if wanted is None else f"no layout serves {wanted:g} requests/s within these latencies"


def _with_options(row: JsonRow) -> str:
    from sim.search.engine_options import choice_words

    return " ".join([_words(row["parallelism"], 1), choice_words(row["options"])]).strip()


def _words(degrees: dict[str, int], least: int = 2) -> str:
    """The degrees of at least so many, and all of pools.

    >>> _words({"tp": 1}), _words({"tp": 1}, 1)
    ('-', 'tp 1')
    """
    from sim.views.serving_search_page import degrees_shown

    return " ".join(degrees_shown(degrees, least)) or "-"


def _cells(row: dict[str, Any], priced: bool) -> list[str]:
    from sim.core.units import seconds
    from sim.views.serving_search_page import NO_LIMIT

    if not row["rate_per_s"]:
        return ["none", *["-"] * (5 + priced)]
    two = [
        ", ".join(seconds(row[k][p]) for p in ("p50", "p99"))
        for k in ("time_to_first_token_s", "time_per_output_token_s")
    ]
    rate = f"{row['rate_per_s']:.3g}" if row["limit_found"] else NO_LIMIT
    cells = [rate, f"{row['output_tokens_per_s_per_gpu']:,.0f}", *two]
    cells += [seconds(row["inter_token_latency_s"]["p99"]), f"{row['energy_kwh_per_million_output_tokens']:.3g}"]
    return [*cells, f"{row['cost_per_million_output_tokens']:.2f}"] if priced else cells
