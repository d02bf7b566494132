"""Tables that `sim.search --slo` prints: each layout's highest rate, the fewest GPUs, throughput against
interactivity."""

from __future__ import annotations

import sys
from typing import Any

from sim.core.units import counted

PIPE_WIDTH = 240  # columns where nobody watches: a table in a file is never cut
CURVE_SHOWN = 12


def print_serving_search(result: dict[str, Any], top: int) -> None:
    """A table of the best layouts, the fewest GPUs for the scenario's own rate, and the curve."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from sim.search.engine_options import choice_words
    from sim.views.serving_search_page import NO_LIMIT

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(
        f"{result['name']}: {counted(result['gpus'], 'GPU')} within {', '.join(result['slo'])}", highlight=False
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    heads = (
        "requests/s",
        "tok/s/GPU",
        "first token p50, p99",
        "a token p50, p99",
        "next token p99",
        "kWh of 1M tokens",
    )
    for head in heads:
        table.add_column(head, justify="right")
    priced = any("cost_per_million_output_tokens" in row for row in result["best"])
    if priced:
        table.add_column("cost of 1M tokens", justify="right")
    table.add_column("layout")
    with_options = any(row["options"] for row in result["best"])
    if with_options:
        table.add_column("options")
    for row in result["best"][:top]:
        options = [choice_words(row["options"])] if with_options else []
        table.add_row(*_cells(row, priced), _words(row["parallelism"]), *options)
    if result["best"]:
        console.print(table)
    wanted, fewest = result["wanted_rate_per_s"], result["fewest_gpus"]
    if fewest is not None:
        n = fewest["gpus"]
        layout = " ".join([_words(fewest["parallelism"], 1), choice_words(fewest["options"])]).strip()
        words = f"{counted(n, 'GPU')} ({layout})"
        console.print(f"the fewest GPUs for {wanted:g} requests/s: {words}", highlight=False)
    elif wanted is not None and any(not row["limit_found"] for row in result["best"]):
        console.print(f"the fewest GPUs for {wanted:g} requests/s: {NO_LIMIT}", highlight=False)
    elif not result["best"]:
        console.print("no layout can be simulated", highlight=False)
    elif wanted is not None:
        console.print(f"no layout serves {wanted:g} requests/s within these latencies", highlight=False)
    for refusal in result["refusals"]:
        words = " ".join([_words(refusal["parallelism"], 1), choice_words(refusal["options"])]).strip()
        console.print(f"not simulated: {words}: {refusal['reason']}", highlight=False, markup=False)
    curve = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("tok/s/user", "tok/s/GPU", "requests/s/GPU"):
        curve.add_column(head, justify="right")
    curve.add_column("layout")
    if with_options:
        curve.add_column("options")
    shown = result["curve"][:: max(1, len(result["curve"]) // CURVE_SHOWN)]
    for point in shown:
        figures = [point[k] for k in ("tokens_per_s_per_user", "output_tokens_per_s_per_gpu", "rate_per_s_per_gpu")]
        options = [choice_words(point["options"])] if with_options else []
        curve.add_row(*(f"{x:,.4g}" for x in figures), _words(point["parallelism"]), *options)
    if shown:
        console.print("throughput against speed for a user (best of all layouts and rates):", highlight=False)
        console.print(curve)


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
