"""The standalone page of a search for serving layouts: throughput against interactivity, and each layout's rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.core.units import count, counted, seconds
from sim.search.engine_options import choice_words
from sim.search.serving_found import (
    CurvePoint,
    FewestGpus,
    RefusedLayout,
    ServedRate,
    ServingLayout,
    ServingSearchResult,
)
from sim.serve.results.records import STATISTICS
from sim.studies.promised_latencies import QUANTITIES, parse_slo
from sim.views.headline import Number
from sim.views.page import still_page
from sim.views.scatter import explained, grouped_dots, scatter_plot
from sim.views.sorted_table import NOTHING, Cell, SortedTable, sorted_table, word

_TIP = (
    "<div><b>@words</b></div><div>@user tokens/s a user, @gpu tokens/s/GPU</div>"
    "<div>@rate requests/s/GPU offered, @kept</div>"
)
NO_LIMIT = "no limit found: too few requests"
FIRST = {"Layout": "", "Options": "of the engine", "Requests/s": "", "Output tokens/s/GPU": ""}  # heads, their meanings
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token, a request's mean",
    "itl": "inter-token latency: the time between two tokens",
    "latency": "a request's whole time",
}
LAST = {
    "kWh/M tokens": "of a million output tokens: GPUs alone, at their power limit",
    "Cost/M tokens": "of a million output tokens",
}
ALWAYS = (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("itl", "p99"))


def serving_search_page(result: ServingSearchResult) -> str:
    """Return HTML of a search that opens without network."""
    plots = {"curve": _figure(result.curve)} if result.curve else {}
    return still_page(
        "serving_search.html",
        f"Serving search: {result.name}",
        plots,
        what=searched_words(result),
        headline=_headline(result),
        table=layouts_table(result, result.best),
        same_hosts=[same_host_words(engines) for engines in result.same_host_times],
        refusals=[(row_words(r), r.reason) for r in result.refusals],
    )


def searched_words(result: ServingSearchResult) -> str:
    """Return the number of GPUs and the limits of latency that a layout must keep, in words; of a search that Ctrl-C
    ended also what it had not come to."""
    limits = ", ".join(promise.words for promise in parse_slo(",".join(result.slo)))
    left = ""
    if result.unsearched is not None:
        left = f"; INCOMPLETE, ended by Ctrl-C: {counted(result.unsearched, 'layout')} not searched"
    return f"{counted(result.gpus, 'GPU')} within {limits}{left}"


def layouts_table(result: ServingSearchResult, rows: Sequence[ServingLayout]) -> SortedTable:
    """The highest rate of each layout with each engine, and its latencies: some always, and those that are promised."""
    promised = [(p.quantity, p.statistic) for p in parse_slo(",".join(result.slo))]
    shown = [(q, s) for q in LATENCIES for s in STATISTICS if (q, s) in (*ALWAYS, *promised)]
    latencies = {f"{q.upper() if q != 'latency' else 'Latency'} {s}": LATENCIES[q] for q, s in shown}
    return sorted_table("best", FIRST | latencies | LAST, [_cells(row, shown) for row in rows])


def layout_words(parallelism: Mapping[str, int], least: int = 2) -> str:
    """Say a layout in words: its degrees that are at least `least`.

    >>> layout_words({"tp": 4, "pp": 1, "dp": 2}), layout_words({"tp": 1})
    ('tp 4, dp 2', 'one GPU')
    >>> pools = {"prefill_replicas": 2, "prefill_tp": 1, "decode_replicas": 1, "decode_tp": 4, "decode_ep": 8}
    >>> layout_words(pools), layout_words({**pools, "services": 2})
    ('prefill 2 × tp 1, decode 1 × tp 4 ep 8', 'prefill 2 × tp 1, decode 1 × tp 4 ep 8, twice')
    """
    if "prefill_tp" in parallelism:
        return _pools_words(parallelism)
    return ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in parallelism.items() if v >= least) or "one GPU"


def _pools_words(parallelism: Mapping[str, int]) -> str:
    """Say each pool's replicas as the summary of a run does, and how often the pair of pools is there."""
    words = []
    for pool in ("prefill", "decode"):
        degrees = {key: parallelism.get(f"{pool}_{key}", 1) for key in ("tp", "ep")}
        shown = " ".join(f"{key} {n}" for key, n in degrees.items() if key == "tp" or n > 1)
        words.append(f"{pool} {parallelism[f'{pool}_replicas']} × {shown}")
    services = parallelism.get("services", 1)
    return ", ".join([*words, *(["twice" if services == 2 else f"{services} times"] if services > 1 else [])])


def row_words(row: ServingLayout | CurvePoint | RefusedLayout | FewestGpus, least: int = 2) -> str:
    """Say a row in words: its layout's degrees of at least `least`, and the engine's options if any were searched."""
    return ", ".join([layout_words(row.parallelism, least), *[choice_words(row.options)] * bool(row.options)])


def nearest_words(result: ServingSearchResult) -> str:
    """Say by how much the layout that comes nearest misses the promised latencies; nothing where one keeps them."""
    best = min(result.best, key=lambda row: row.excess)
    if best.excess <= 1.0:
        return ""
    missed = "; ".join([parse_slo(b.promise)[0].missed(b.found_s) for b in best.broken])
    nearest = f"the nearest, {row_words(best)}, misses even with one request at a time"
    return f"no layout keeps these latencies; {nearest}: {missed}"


def same_host_words(engines: Sequence[str]) -> str:
    """Say that these engines share one record of host times, because nobody has measured each of them."""
    return f"{', '.join(engines)}: one record of host times; between them only schedulers, kernels and memory differ"


def _headline(result: ServingSearchResult) -> list[Number]:
    promised = parse_slo(",".join(result.slo))
    kinds = {promise.quantity for promise in promised}
    why = nearest_words(result) if result.best else "no layout can be simulated"
    numbers = [Number("Highest rate", "none", why, "bad")]
    best = next((row for row in result.best if row.highest), None)
    if best is not None and best.highest is not None:
        layout, each = row_words(best), f"{best.rate_per_s / result.gpus:.3g} a GPU"
        highest = Number("Highest rate", f"{best.rate_per_s:.3g} requests/s", f"{layout}; {each}", "good")
        if not best.limit_found:
            highest = Number("Highest rate", "unknown", f"{layout}; {NO_LIMIT}", "bad")
        numbers = [
            highest,
            Number("Output tokens/s/GPU", count(best.highest.output_tokens_per_s_per_gpu), ""),
            *(_latency(best.highest, p.quantity, p.statistic, f"{p.words} is promised") for p in promised),
            *(_latency(best.highest, name, "p99", "p99") for name in ("ttft", "tpot") if name not in kinds),
        ]
    wanted, fewest = result.wanted_rate_per_s, result.fewest_gpus
    if wanted is not None:
        unknown = any(not row.limit_found for row in result.best)
        said = ("unknown" if unknown else "none") if fewest is None else count(fewest.gpus)
        note = f"for {wanted:g} requests/s" + ("" if fewest is None else f", {row_words(fewest)}")
        numbers.append(Number("Fewest GPUs", said, note, "bad" if fewest is None else ""))
    return numbers


def _latency(found: ServedRate, quantity: str, statistic: str, note: str) -> Number:
    """One latency at the highest rate: a promised one beside its promise."""
    words = LATENCIES[quantity].partition(":")[0].partition(",")[0]
    return Number(words[0].upper() + words[1:], seconds(getattr(getattr(found, QUANTITIES[quantity]), statistic)), note)


def _figure(curve: Sequence[CurvePoint]) -> Any:
    plot = scatter_plot("curve", "tokens/s of a user (median)", "output tokens/s/GPU")
    by_layout: dict[str, list[CurvePoint]] = {}
    for point in curve:
        by_layout.setdefault(row_words(point), []).append(point)
    groups = {name: _columns(name, points) for name, points in by_layout.items()}
    dots = grouped_dots(plot, "layout", groups, size=9, fill_alpha="alpha")
    return explained(plot, dots, _TIP)


def _columns(name: str, points: Sequence[CurvePoint]) -> dict[str, list[Any]]:
    return {
        "x": [p.tokens_per_s_per_user for p in points],
        "y": [p.output_tokens_per_s_per_gpu for p in points],
        "words": [name] * len(points),
        "user": [f"{p.tokens_per_s_per_user:,.4g}" for p in points],
        "gpu": [f"{p.output_tokens_per_s_per_gpu:,.4g}" for p in points],
        "rate": [f"{p.rate_per_s_per_gpu:.3g}" for p in points],
        "kept": ["within the limits" if p.within_slo else "beyond a limit" for p in points],
        "alpha": [0.9 if p.within_slo else 0.1 for p in points],
    }


def _cells(row: ServingLayout, latencies: Sequence[tuple[str, str]]) -> list[Cell]:
    """A layout's cells; `latencies`: which quantities and statistics."""
    options, at = choice_words(row.options), row.highest
    first = [word(layout_words(row.parallelism)), word(options) if options else NOTHING]
    if at is None:
        return [*first, ("0", "none"), *[NOTHING] * (1 + len(latencies) + len(LAST))]
    times_s = [getattr(getattr(at, QUANTITIES[quantity]), statistic) for quantity, statistic in latencies]
    energy, cost = at.energy_kwh_per_million_output_tokens, at.cost_per_million_output_tokens
    return [
        *first,
        (f"{row.rate_per_s:.9f}", f"{row.rate_per_s:.3g}" if row.limit_found else NO_LIMIT),
        (f"{at.output_tokens_per_s_per_gpu:.6f}", count(at.output_tokens_per_s_per_gpu)),
        *[(f"{s:.12f}", seconds(s)) for s in times_s],
        NOTHING if energy is None else (f"{energy:.6f}", f"{energy:.3g}"),
        NOTHING if cost is None else (f"{cost:.6f}", f"{cost:.2f}"),
    ]
