"""Tables that `sim.search --slo` prints: each layout's highest rate, the fewest GPUs, throughput against
interactivity."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from sim.commands.rich_tables import as_printed, console_of, plain_table
from sim.core.units import counted

CURVE_SHOWN = 12
DEGREES = {"tp", "pp", "dp", "ep"}  # of replicas; pools for prompts and tokens have others
JsonRow = Mapping[str, Any]
CURVE = {  # columns of the curve, and their keys
    "tok/s/user": "tokens_per_s_per_user",
    "tok/s/GPU": "output_tokens_per_s_per_gpu",
    "requests/s/GPU": "rate_per_s_per_gpu",
}


def print_serving_search(result: JsonRow, top: int) -> None:
    """A table of the best layouts, the fewest GPUs for the scenario's own rate, and the curve."""
    from sim.views.serving_search_page import layouts_table, row_words, same_host_words

    console = console_of()
    say = partial(console.print, highlight=False)
    say(f"{result['name']}: {counted(result['gpus'], 'GPU')} within {', '.join(result['slo'])}")
    if result["best"]:
        console.print(as_printed(layouts_table(result["best"][:top])))
    if words := _fewest_words(result):
        say(words)
    for engines in result["same_host_times"]:
        say(same_host_words(engines))
    for refusal in result["refusals"]:
        say(f"not simulated: {row_words(refusal)}: {refusal['reason']}", markup=False)
    shown = result["curve"][:: max(1, len(result["curve"]) // CURVE_SHOWN)]
    if shown:
        say("throughput against speed for a user (best of all layouts and rates):")
        table = plain_table()
        for head in CURVE:
            table.add_column(head, justify="right")
        table.add_column("layout")
        for point in shown:
            table.add_row(*(f"{point[key]:,.4g}" for key in CURVE.values()), row_words(point))
        console.print(table)


def _fewest_words(result: JsonRow) -> str:
    """The fewest GPUs that carry the scenario's own rate, or why there are none; nothing where it has no rate."""
    from sim.views.serving_search_page import NO_LIMIT, row_words

    wanted, fewest = result["wanted_rate_per_s"], result["fewest_gpus"]
    if fewest is not None:
        layout = f" ({row_words(fewest)})" if fewest["gpus"] > 1 else ""
        said = f"the fewest GPUs for {wanted:g} requests/s: {counted(fewest['gpus'], 'GPU')}{layout}"
        if not fewest["parallelism"].keys() <= DEGREES:
            return said
        sets = " ".join(f"--set parallelism.{key}={n}" for key, n in fewest["parallelism"].items())
        tried = f"replicas of at most {counted(result['gpus'], 'GPU')} were tried, --gpus N tries larger ones"
        return f"{said}; {tried}\nto simulate them: stepsim run SCENARIO {sets}"
    if wanted is not None and any(not row["limit_found"] for row in result["best"]):
        return f"the fewest GPUs for {wanted:g} requests/s: {NO_LIMIT}"
    if not result["best"]:
        return "no layout can be simulated; --gpus N searches layouts of N GPUs"
    return "" if wanted is None else f"no layout serves {wanted:g} requests/s within these latencies"
